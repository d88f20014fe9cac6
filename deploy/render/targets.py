"""The targets that a manifest can be rendered for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from relayline.deploy.manifest.gateway import Behind, GatewayManifest
from relayline.deploy.manifest.model import Manifest
from relayline.deploy.render import (
    compose,
    compose_gateway,
    compose_hosts,
    kubernetes,
    kubernetes_gateway,
    leaderworkerset,
)
from relayline.wire.common.errors import UsageError
from relayline.wire.common.texts import named_stage

TARGETS: Final = (compose.TARGET, compose_hosts.TARGET, kubernetes.TARGET, leaderworkerset.TARGET)
COMPOSE: Final = frozenset({compose.TARGET, compose_hosts.TARGET})


def render(manifest: Manifest, target: str, models_dir: str = ".") -> dict[str, str]:
    """Return the rendered files by name, in the order in which they should be applied.

    The same manifest gives the same bytes. `models_dir` is where Compose finds the model's directory, seen from the
    rendered file. Raises UsageError for a manifest that the target cannot run.
    """
    if manifest.spares:
        raise UsageError("spares stand by where `relayline up` runs the pipeline; leave them out of what is rendered")
    if relayed := [stage.name for stage in manifest.stages if stage.relay]:
        raise UsageError(
            f"{named_stage(relayed[0])} has `relay`, which is for hosts that run `relayline join`; "
            "leave it out of what is rendered"
        )
    if target == compose.TARGET:
        return {"compose.yaml": compose.render(manifest, models_dir)}
    if target == compose_hosts.TARGET:
        return compose_hosts.render(manifest, models_dir)
    if target == kubernetes.TARGET:
        return kubernetes.render(manifest)
    return leaderworkerset.render(manifest)


def render_gateway(
    gateway: GatewayManifest, pipelines: tuple[Behind, ...], target: str, models_dirs: Mapping[str, str]
) -> dict[str, str]:
    """Return the same for a gateway and all pipelines behind it that have a manifest.

    `models_dirs`: as `models_dir` above, by the pipelines' names. Raises UsageError.
    """
    if target == compose.TARGET:
        return {"compose.yaml": compose_gateway.render(gateway, pipelines, models_dirs)}
    if target == kubernetes.TARGET:
        return kubernetes_gateway.render(gateway, pipelines)
    raise UsageError(
        f"--target {target} renders one pipeline: render each by itself and give the gateway its url; or render the "
        f"gateway for {compose.TARGET} or {kubernetes.TARGET}"
    )
