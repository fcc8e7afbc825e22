"""Uses of the core around models: server, export, studies, benchmarks, the Hugging Face Hub. No app imports another."""
