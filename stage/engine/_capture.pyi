"""The compiled module has no Python-level names; stage.capture reaches its C symbols through ctypes."""
