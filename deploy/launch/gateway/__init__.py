"""`relayline up` of a gateway's manifest: the gateway, and an `up` of its own for each pipeline behind it."""
