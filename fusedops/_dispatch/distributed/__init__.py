"""The ops on DTensors. Loaded once there can be a DTensor."""
