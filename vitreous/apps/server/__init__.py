"""HTTP server for a trained model: limits on requests, decoding in disposable processes, batching, and a web page."""
