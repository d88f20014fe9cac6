"""A stage put together: from its artifact and configuration to the parts that compute its steps."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from llama_cpp import llama_cpp as llama

from relayline.stage.config import StageConfig
from relayline.stage.engine.artifact import StageArtifact, open_unverified, verify_artifact
from relayline.stage.engine.embedding import EmbeddingTable
from relayline.stage.engine.load_attempts import attempt
from relayline.stage.engine.loading import Load, use_files
from relayline.stage.engine.native import EngineConfig, NativeEngine
from relayline.stage.engine.open_tier import held_lanes, open_tier
from relayline.stage.engine.place import check_place, idle_gpus, place_of
from relayline.stage.facts import StageFacts
from relayline.stage.sampling.constraint import read_vocabulary
from relayline.stage.speed.curves import Curves
from relayline.stage.speed.device_turn import first_curves
from relayline.stage.steps.lane_states import LaneStates
from relayline.stage.steps.lanes import LaneTable
from relayline.stage.steps.padding import Padding
from relayline.stage.steps.policy import POLICIES, Policy, StepLimits
from relayline.stage.steps.step import StepExecutor
from relayline.wire.common.bounds import DRAFTED_ROWS_MAX, GRANT_STEPS_MAX
from relayline.wire.common.curve import PAD_SEARCH_ROWS, CostCurve
from relayline.wire.common.versions import version_of

log = logging.getLogger("relayline.stage")


def load_stage(
    config: StageConfig, load: Load | None = None, like: Curves | None = None
) -> tuple[StageFacts, StepExecutor]:
    """Verify and load the artifact; takes as long as the disk needs.

    Raises LoadStoppedError when stopped. Its speed is measured if the configuration asks for it, or starts as a copy of
    the curves of `like`.
    """
    check_place(config.engine)  # a large file takes long to verify
    drafters = [config.inner.drafter] if config.inner is not None and config.inner.drafter is not None else []
    use = use_files(config.artifact, *(adapter.path for adapter in config.adapters), *drafters)
    try:
        artifact = verify_artifact(config.artifact, load) if config.verify else open_unverified(config.artifact)
        artifact = artifact.handing_on(config.inner.layers if config.inner is not None else ())
        with attempt(config.artifact):
            return _load(config, artifact, load, like, use.close)
    except BaseException:
        use.close()
        raise


def _load(
    config: StageConfig,
    artifact: StageArtifact,
    load: Load | None,
    like: Curves | None,
    release: Callable[[], None],
) -> tuple[StageFacts, StepExecutor]:
    settings = config.engine.of_architecture(artifact.architecture)
    config = dataclasses.replace(config, engine=settings)
    if settings.gpu_layers and not llama.llama_supports_gpu_offload():
        log.warning("llama.cpp finds no GPU: all layers run on the CPU; `relayline doctor` says why")
    elif not settings.gpu_layers and (idle := idle_gpus()):
        log.warning("%s is not used; --gpu-layers -1 (in a manifest: device: gpu) puts all layers there", idle[0])
    # Rows of a spare lane would be a separate micro-batch if lanes have separate cells.
    spare_lanes = 1 if settings.layout_used == "unified" else 0
    wanted_max = min(settings.n_lanes + DRAFTED_ROWS_MAX + PAD_SEARCH_ROWS, settings.max_rows)
    engine = NativeEngine(
        EngineConfig(
            artifact_path=config.artifact,
            settings=settings,
            spare_lanes=spare_lanes,
            held_lanes=held_lanes(settings, spare_lanes),
            max_wanted=wanted_max,
            adapters=config.adapters,
            inner_layers=artifact.inner_layers,
            drafter=config.inner.drafter if config.inner is not None else None,
        ),
        load,
    )
    try:
        return _assembled(config, artifact, engine, load, like, release)
    except BaseException:
        engine.close()
        raise


def _assembled(
    config: StageConfig,
    artifact: StageArtifact,
    engine: NativeEngine,
    load: Load | None,
    like: Curves | None,
    release: Callable[[], None],
) -> tuple[StageFacts, StepExecutor]:
    """Put together what serves an engine; its speed is measured, or copied. `release` is called when it is closed."""

    def close() -> None:
        engine.close()
        release()

    settings, spare_lanes = config.engine, engine.config.spare_lanes
    place = place_of(settings)
    embeddings = EmbeddingTable(artifact, engine.config.settings.n_threads) if artifact.is_first else None
    curves = like.copy(has_head=engine.is_last) if like is not None else first_curves(engine, place, load)
    facts = StageFacts(
        artifact,
        config,
        version_of(),
        curves,
        rewinds(engine),
        engine.keeps_state,
        engine.rewind_rows,
        predictions=engine.rewinds.predictor.n_drafts if engine.rewinds.predictor is not None else 0,
        takes_mutual_rows=not engine.rewinds.are_recurrent,
        goes_by_tiles=engine.attention.goes_by_tiles,
        place=place,
        name=own_name(config),
    )
    # With a recurrent state a lane's further rows are computed apart: scratch rows would be another micro-batch.
    pads = settings.policy == "auto" and spare_lanes > 0 and not engine.rewinds.are_recurrent
    keeps_window = engine.attention.keeps_window
    executor = StepExecutor(
        engine,
        LaneTable(settings.n_lanes, settings.ctx_tokens),
        artifact.stage_index,
        embeddings,
        close=close,
        padding=Padding(curves, settings.n_lanes, engine.max_wanted, enabled=pads),
        vocabulary=read_vocabulary(engine.vocab, engine.n_vocab) if engine.is_last else None,
        states=LaneStates(
            engine, engine.saved, open_tier(settings, artifact, keeps_window=keeps_window, name=config.name)
        ),
        predictor=engine.rewinds.predictor,
    )
    return facts, executor


def rewinds(engine: NativeEngine) -> bool:
    """Return whether any lane can be taken back by the rows of a draft or a grant."""
    attention, settings = engine.attention, engine.config.settings
    if engine.rewinds.are_recurrent or (attention.window and settings.layout_used != "per-lane"):
        return False
    # llama.cpp keeps the cells of a window and of a largest step, so about so many rows can be taken back. After a step
    # back across the end of a lane's cells it is some fewer for one round; beyond that a session is replayed.
    return not attention.keeps_window or engine.max_rows >= GRANT_STEPS_MAX


def own_name(config: StageConfig) -> str:
    """Return which stage its credential says that this is, empty without one."""
    identity = config.security.identity
    return identity.name if identity is not None else ""


def make_policy(config: StageConfig, curves: Curves) -> Policy:
    """Return the batching policy that the configuration names."""
    settings = config.engine
    # Rows of other lanes are computed separately if lanes have separate cells: there is nothing to fill up.
    curve = curves.decode if settings.layout_used == "unified" else CostCurve()
    limits = StepLimits(settings.max_rows, settings.prefill_rows, curve, settings.n_lanes + DRAFTED_ROWS_MAX)
    return POLICIES[settings.policy](limits)
