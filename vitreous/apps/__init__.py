"""Applications of the core: server, export, dataset curation, studies, benchmarks, and the Hugging Face Hub. No app
imports another."""
