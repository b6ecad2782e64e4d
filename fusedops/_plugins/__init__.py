"""The backends and ops of this process: plugins, how they are discovered and checked, and the registry."""
