"""`python -m relayline.deploy.cli`: the same as the `relayline` command."""

from relayline.deploy.cli.entry import main

main()
