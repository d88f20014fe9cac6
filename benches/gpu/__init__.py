"""What relayline does on one GPU: see `benches/gpu/__main__.py`. Nothing else of the project needs one."""
