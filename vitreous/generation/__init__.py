"""From noise to images: processes that add noise, the samplers that take it away, and guidance between two answers."""
