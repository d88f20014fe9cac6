"""`relayline doctor`: what this machine, a manifest's other hosts and its files lack, and what to do about each."""
