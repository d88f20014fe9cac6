"""The processes that read, check and tokenise bodies, and their schedule."""
