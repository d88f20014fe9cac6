import relayline.wire  # noqa: F401 - it sets what gRPC reads when it is first imported, and modules here import gRPC first
