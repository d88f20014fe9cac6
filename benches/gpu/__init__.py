"""The bench of relayline on one GPU, see `benches/gpu/__main__.py`. No other part of the project needs a GPU."""
