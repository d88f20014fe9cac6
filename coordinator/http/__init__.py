"""The HTTP API of one model. Knows requests, replies and SSE; knows no stage and no gRPC.

A request passes through `edge` (the connection, keys, errors), `handlers.py` (its route), `workers` (processes that
read its body by `requests`), and `replies` (the streams of its answer, as JSON or events). `llama`, `messages`,
`responses` and `embeddings` are further dialects: `asking.py` reads a body, `dialect.py` writes an answer. `page` is
the page at `/`.
"""
