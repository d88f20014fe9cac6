"""`relayline doctor`: checks this machine, a manifest's other hosts and its files, with a remedy for each problem."""
