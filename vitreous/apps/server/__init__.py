"""HTTP server for a trained model: admission control, decoding in disposable processes, batching, and a web page."""
