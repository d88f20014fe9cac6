"""The notes of a plan: the gain of one more host, unknown values, another order of the stages; and its draft model."""

from __future__ import annotations

from pathlib import Path

from relayline.coordinator.model.inspection import ModelFacts
from relayline.coordinator.planner.instance import Instance
from relayline.coordinator.planner.predict import Prediction
from relayline.coordinator.planner.search import Best
from relayline.coordinator.planner.whatif import one_more, other_last
from relayline.coordinator.schedule.shared_devices import sharing
from relayline.deploy.launch.lanes import lowered_lanes
from relayline.deploy.manifest import Manifest
from relayline.deploy.planning.drafting import draft_memory, gpus_bytes, has_coordinator
from relayline.deploy.planning.report import Draft, Variant
from relayline.deploy.planning.shared import gpu_sharing
from relayline.wire.common.texts import counted

ORDER_SIZE_MAX = 400  # stages x layers up to which other orders are tried: each takes a separate search
ORDER_GAIN_MIN = 1.05


def variants(instance: Instance, best: Best, prediction: Prediction) -> tuple[Variant, ...]:
    """Plan again with a copy of the host that limits, and with one of the fastest host if that is another."""
    hosts = instance.hosts
    rows = 1
    steps = [stage.step_ns[rows] for stage in prediction.stages]
    limiting = max(range(len(hosts)), key=steps.__getitem__)
    fastest = min(range(len(hosts)), key=lambda at: hosts[at].speed.layer_ns(rows))
    chosen = {limiting: "the slowest stage"}
    if hosts[fastest].speed != hosts[limiting].speed:
        chosen[fastest] = "the fastest host"
    found = []
    for stage, why in chosen.items():
        more = one_more(instance, stage)
        if more is not None:
            cuts = tuple(start for start, _ in more.best.edges[1:])
            gain = more.best.rate / best.rate - 1
            found.append(Variant(more.like, more.after, why, more.best.rate * 1e9, gain, cuts))
    return tuple(found)


def notes_of(manifest: Manifest, instance: Instance, facts: ModelFacts) -> tuple[str, ...]:
    """Return a line for everything that a reader of the plan should know of its hosts and its context."""
    notes = []
    sources = {host.speed.source for host in instance.hosts}
    if "estimated" in sources:
        names = ", ".join(host.name for host in instance.hosts if host.speed.source == "estimated")
        notes.append(
            f"the speed of {names} is an estimate; `relayline plan --measure` measures this machine, and "
            "`relayline up` other hosts when they join"
        )
    unknown = [host.name for host in instance.hosts if host.memory_bytes is None and host.machine.memory_bytes is None]
    if relayed := [stage.name for stage in manifest.stages if stage.relay]:
        notes.append(f"{', '.join(relayed)}: reached through the relay at {manifest.spec.coordinator.host}")
    if unknown:
        notes.append(f"the memory of {', '.join(unknown)} is unknown; give memoryGib so that it is checked")
    if facts.ctx_train and manifest.engine.ctx_tokens > facts.ctx_train:
        notes.append(f"the model was trained for {facts.ctx_train} tokens, the context has more")
    notes += lowered_lanes(manifest, facts)
    notes += gpu_sharing(manifest)
    if manifest.serving.grant_steps and len(instance.hosts) > 1:
        notes.append("the rates are those without grants (grantSteps), which save the way to the coordinator and back")
    on_cores = [
        (place, host.name) for place, host in zip(instance.places, instance.hosts, strict=True) if not host.is_on_gpu
    ]
    notes += sharing([place for place, _ in on_cores], [name for _, name in on_cores])
    return tuple(notes)


def draft_of(manifest: Manifest) -> Draft | None:
    """Return the draft model that is served with a manifest; None where there is none."""
    serving = manifest.serving
    memory = draft_memory(serving)
    if memory is None:
        return None
    n_bytes = gpus_bytes() if memory.gpu is not None and has_coordinator(manifest) else 0
    return Draft(Path(serving.draft_model).name, serving.draft_ctx_tokens, memory, n_bytes)


def order_note(instance: Instance, best: Best) -> tuple[str, ...]:
    """Say if another order of the stages would be clearly better: the last one has the head to compute as well."""
    if len(instance.hosts) * instance.model.n_layers > ORDER_SIZE_MAX:
        return ()
    other = other_last(instance)
    if other is None or other.best.rate < ORDER_GAIN_MIN * best.rate:
        return ()
    return (
        f"with {other.last} as the last stage, which computes the head, {other.best.rate * 1e9:.1f} tok/s would be "
        f"possible at {counted(instance.load.streams, 'stream')} ({other.best.rate / best.rate - 1:+.0%})",
    )
