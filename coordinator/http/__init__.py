"""The OpenAI-compatible HTTP side of the coordinator. Knows requests, replies and SSE; knows no stage and no gRPC."""
