"""`relayline serve` whose own links lead through proxies: `FAR=PROXY=STAGE,... python -m benches.far_serve serve ...`.

The stages get the addresses of each other, so that only messages of the coordinator pass the proxies.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from relayline.coordinator.engine import connection
from relayline.deploy.cli.main import main

VARIABLE = "FAR"


def between_stages(behind: dict[str, str]) -> None:
    """Have stages told each other's addresses. `behind`: the stage's address by its proxy's."""
    made = connection._order

    def order(index: int, peers: connection.Peers, *rest: Any) -> Any:
        addresses = [behind.get(each, each) for each in peers.addresses]
        return made(index, dataclasses.replace(peers, addresses=addresses), *rest)

    connection._order = order  # type: ignore[assignment]


if __name__ == "__main__":
    between_stages(dict(pair.split("=") for pair in os.environ[VARIABLE].split(",")))
    main()
