"""Image generation: noise processes, samplers, and classifier-free guidance."""
