"""Flags of joining, on both sides: `relayline serve --join-listen` and `relayline stage --join`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from relayline.deploy.cli.options import Address, AddressList, Line, given_settings, is_given, telemetry_config
from relayline.deploy.cli.paths import Directory, DirectoryToRead, FileToRead, FileToWrite, PathToRead
from relayline.deploy.launch.serving import ServedSplit, for_each_stage, read_manifest
from relayline.wire.common.errors import UsageError
from relayline.wire.common.places import artifacts_dir
from relayline.wire.links.security import LinkSecurity, address_of
from relayline.wire.settings.setting import Reader, entries, from_parameters
from relayline.wire.settings.table import EngineSettings, ServingSettings, TelemetrySettings
from relayline.wire.telemetry.config import Level, TelemetryConfig

if TYPE_CHECKING:
    from relayline.coordinator.config import Joinable
    from relayline.coordinator.engine.membership import Place
    from relayline.coordinator.joining.config import EnrolConfig, JoinConfig, OpenUnread, PoolState
    from relayline.deploy.manifest import Manifest
    from relayline.stage.config import StageConfig
    from relayline.stage.joining.config import JoinConfig as StageJoinConfig
    from relayline.wire.model_files.adapters import Adapter
    from relayline.wire.model_files.eagle3 import Drafter
    from relayline.wire.pb.relayline.v1 import join_pb2 as pb

Command = Callable[..., Any]
# Parameters that mean nothing where stages have been started already, and that a stage which joins cannot have.
ENGINE_FLAGS = tuple(entry.parameter for entry in entries(EngineSettings) if entry.reader is Reader.STAGE)
SET_BY_ORDER = (
    *(entry.parameter for entry in entries(EngineSettings) if not entry.host_wins),
    "no_verify",
    "lora",
    "draft_model",
)


relay_option = click.option(
    "--relay/--no-relay",
    "is_relayed",
    default=None,
    help="Nobody can connect to this host (NAT, firewall): let others reach it through the coordinator's host.",
)


def serve_split_options(command: Command) -> Command:
    """Add the coordinator's flags of what it serves, and of the files in which it remembers who has which layers."""
    for option in (
        click.option("--fixed", type=Line(), default="", hidden=True),
        click.option("--beside", type=Line(), default="", hidden=True),  # as `up` has it
        click.option("--settle", type=FileToWrite(), hidden=True),
        click.option(
            "--plan-file",
            type=FileToWrite(),
            help="File that remembers why each stage has its layers. With it, layers that the manifest leaves open are "
            "planned from the measurements of joining hosts.",
        ),
        click.option(
            "--keep-layers",
            type=FileToWrite(),
            help="File that remembers moved layers, so that a restarted coordinator goes on with them.",
        ),
        click.option("--model", type=PathToRead(), help="The model that was split. Needed to move layers."),
        click.option("--pipeline", "directory", type=DirectoryToRead(), help="Directory that `split` wrote."),
        click.option(
            "--manifest",
            type=FileToRead(),
            is_eager=True,
            callback=read_manifest,
            help="Take model, stages and settings from a manifest; flags win over it.",
        ),
    ):
        command = option(command)
    return command


def serve_join_options(command: Command) -> Command:
    """Add the coordinator's flags: given addresses, or stages that join. The engine flags apply to the latter."""
    for option in (
        click.option(
            "--names",
            type=Line("name,..."),
            default="",
            help="Names of the stages, in layer order [default: stage-0,...].",
        ),
        click.option(
            "--spares",
            type=Line("name,..."),
            default="",
            help="Names of spares: stages that hold layers only in place of a lost or drained one.",
        ),
        click.option(
            "--authority",
            type=DirectoryToRead(),
            help="With --enrol-listen: directory of the CA that signs.",
        ),
        click.option("--enrol-listen", type=Address(), help="Where hosts get certificates with `relayline join`."),
        click.option(
            "--relay-listen",
            type=Address(),
            help="With --join-listen: where the tunnels of stages end that are started with --relay "
            "[default: the same host, a port that the system chooses].",
        ),
        click.option("--join-listen", type=Address(), help="Instead of --stages: where stages join."),
        click.option("--stages", type=AddressList(), help="Stage addresses in layer order."),
    ):
        command = option(command)
    return command


def stage_join_options(command: Command) -> Command:
    """Add the stage's flags: its own artifact, or a pipeline to join."""
    for option in (
        click.option(
            "--always-fetch", is_flag=True, help="Fetch even if this host can read the coordinator's own file."
        ),
        click.option(
            "--advertise",
            type=Line("host"),
            default="",
            help="Address that others connect to [default: the one that the coordinator sees].",
        ),
        relay_option,
        click.option("--cache", type=Directory(), help="Where fetched artifacts are kept."),
        click.option(
            "--token",
            type=Line("token"),
            default="",
            help="With --join: the join token. Beware: others can see it in the process list.",
        ),
        click.option("--name", type=Line("name"), default="", help="With --join: this stage's name in the pipeline."),
        click.option("--join", "coordinator", type=Address(), help="Get settings and artifact from this coordinator."),
        click.option("--artifact", type=FileToRead(), help="This stage's GGUF file from `split`."),
    ):
        command = option(command)
    return command


def _explicit(given: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """Return the flags among `names` that the user gave, in the user's spelling."""
    context = click.get_current_context()
    by_user = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    written = {p.name: p.opts[0] for p in context.command.params}
    return [written[name] for name in names if name in given and context.get_parameter_source(name) in by_user]


def coordinator_join(
    given: dict[str, Any],
    n_stages: int,
    adapters: tuple[Adapter, ...] = (),
    known: PoolState | None = None,
    open_unread: OpenUnread | None = None,
) -> JoinConfig | None:
    """Return how stages join, None if their addresses are given. `check_join_flags` has been called.

    `adapters`: of LoRA. `known`: the holders of layers since an earlier coordinator served. `open_unread`: reads
    artifacts of a model whose weights are on the hub. Raises UsageError.
    """
    from relayline.coordinator.engine.roster import default_names
    from relayline.coordinator.joining.config import JoinConfig, JoiningStage
    from relayline.coordinator.relay.config import RelayConfig

    if given["join_listen"] is None:
        return None
    engine = from_parameters(EngineSettings, given)
    names = given_names(given) or default_names(n_stages)
    host, port = given["join_listen"]
    spares = given_spares(given)
    stages = [JoiningStage(name, engine) for name in names]
    stages += [JoiningStage(name, engine, is_spare=True) for name in spares]
    added, added_spares = (known.added, known.added_spares) if known is not None else ((), ())
    stages += [
        JoiningStage(name, engine, is_spare=name in added_spares) for name in added if name not in (*names, *spares)
    ]
    relay = RelayConfig(*(given["relay_listen"] or (host, 0)))
    fixed, enrol = fixed_stages(given), _enrol(given)
    return JoinConfig(
        tuple(stages),
        host,
        port,
        relay=relay,
        enrol=enrol,
        open_unread=open_unread,
        adapters=adapters,
        known=known,
        fixed=fixed,
    )


def served_join(
    given: dict[str, Any], split: ServedSplit, adapters: tuple[Adapter, ...], drafter: Drafter | None
) -> JoinConfig | None:
    """Return how stages join a split that is served, with each one's own settings; None if their addresses are given.

    `drafter`: an EAGLE-3 model. Raises as `coordinator_join`.
    """
    join = coordinator_join(given, split.n_stages, adapters, split.known, split.open_unread)
    join = join and dataclasses.replace(join, drafter=drafter)
    return for_each_stage(join, given["manifest"], split.architecture, given_settings(given))


def fixed_stages(given: dict[str, Any]) -> tuple[str, ...]:
    """Return the stages whose layers the user fixed. A settled manifest has those of all stages; `up` names them."""
    if given["settle"] is not None:
        return tuple(given["fixed"].split(",")) if given["fixed"] else ()
    manifest: Manifest | None = given["manifest"]
    if manifest is None:
        return ()
    return tuple(stage.name for stage in manifest.stages if stage.layer_range is not None)


def check_join_flags(given: dict[str, Any]) -> None:
    """Raise UsageError for flags of `serve` that say nothing or too much about how stages join, for a CA that is none,
    and for files and directories that cannot be kept. Call it once: it warns of the others, and tries the disk.
    """
    from relayline.deploy.launch.kept_places import check_kept_directories, check_kept_files

    kept = ("--keep-layers", given["keep_layers"]), ("--plan-file", given["plan_file"])
    check_kept_files(*kept, may_be_full=given["exit_with_stdin"])
    check_kept_directories(from_parameters(ServingSettings, given), may_be_full=given["exit_with_stdin"])
    if given["enrol_listen"] is not None and (given["join_listen"] is None or given["tls_dir"] is None):
        raise UsageError("--enrol-listen needs --join-listen and --tls DIR")
    if (given["join_listen"] is None) == (given["stages"] is None):
        raise UsageError("give either --stages with every address, or --join-listen to let stages join")
    if given["join_listen"] is None:
        if given["spares"]:
            raise UsageError("--spares is for stages that join; it needs --join-listen")
        if given["relay_listen"] is not None:
            raise UsageError("--relay-listen is for stages that join; it needs --join-listen")
        if engine_flags := _explicit(given, ENGINE_FLAGS):
            raise UsageError(f"{engine_flags[0]} is for stages that join; it needs --join-listen")
    _enrol(given)


def _enrol(given: dict[str, Any]) -> EnrolConfig | None:
    """Return how hosts get their certificates, None where they don't. Raises UsageError."""
    if given["enrol_listen"] is None:
        return None
    if given["authority"] is None:
        raise UsageError("--enrol-listen needs --authority CA-DIR")
    from relayline.coordinator.joining.config import EnrolConfig
    from relayline.deploy.launch.invitations import SigningAuthority

    manifest = given["manifest"]
    host, port = given["enrol_listen"]
    return EnrolConfig(
        SigningAuthority(given["authority"]),
        host,
        port,
        pipeline=manifest.name if manifest is not None else "",
        model=_model_name(manifest) if manifest is not None else "",
        announce=from_parameters(ServingSettings, given).announce,
    )


def _model_name(manifest: Manifest) -> str:
    model = manifest.spec.model
    return (model.path or model.hf or "").rpartition("/")[2].removesuffix(".gguf")


def given_names(given: dict[str, Any]) -> tuple[str, ...]:
    """Return the stages' names in layer order, none where the user gave none."""
    return _names(given["names"])


def given_spares(given: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the stages that hold layers only in the place of another one."""
    return _names(given["spares"])


def _names(listed: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",")) if listed else ()


def joinable_event(joinable: Joinable) -> dict[str, Any]:
    """Return the line that a supervisor reads once stages may join."""
    return {
        "event": "joinable",
        "role": "coordinator",
        "join": joinable.join_address,
        "enrol": joinable.enrol_address,
        "url": joinable.url,
        "stages": list(joinable.names),
    }


def member_event(place: Place) -> dict[str, Any]:
    """Return the line that a supervisor reads when a stage's membership has changed."""
    host = place.member.host if place.member is not None else ""
    return {
        "event": "stage",
        "name": place.name,
        "index": place.index,
        "state": place.state.value,
        "address": place.address,
        "host": host,
        "process": place.process_id,
        "done_bytes": place.done_bytes,
        "total_bytes": place.total_bytes,
        "trouble": place.trouble,
        "failure": place.failure if place.member is None else "",
    }


def stage_join(given: dict[str, Any], security: LinkSecurity) -> StageJoinConfig | None:
    """Return what to join, None with an artifact of one's own. Raises UsageError for both, neither or a stray flag."""
    if (given["coordinator"] is None) == (given["artifact"] is None):
        raise UsageError("give either --artifact FILE, or --join HOST:PORT --name NAME to get one")
    if given["coordinator"] is None:
        for flag in _explicit(given, ("name", "cache", "advertise", "always_fetch", "is_relayed")):
            raise UsageError(f"{flag} belongs to --join")
        return None
    for flag in _explicit(given, SET_BY_ORDER):
        raise UsageError(f"{flag} is set by the coordinator when a stage joins; give it to `relayline serve`")
    listen = given["listen"] if _explicit(given, ("listen",)) else None
    return join_config(given, address_of(*given["coordinator"]), given["name"], listen, security)


def join_config(
    given: dict[str, Any], coordinator: str, name: str, listen: tuple[str, int] | None, security: LinkSecurity
) -> StageJoinConfig:
    """Return how a stage joins by the flags that `stage --join` and `join` share. `listen` None: the order says."""
    from relayline.stage.joining.config import JoinConfig

    host, port = listen or ("", 0)
    return JoinConfig(
        coordinator=coordinator,
        name=name,
        cache=given["cache"] or artifacts_dir(),
        host=host,
        port=port,
        advertise=given["advertise"],
        own_settings=own_settings(given),
        always_fetch=given["always_fetch"],
        security=security,
        is_relayed=bool(given["is_relayed"]),
    )


def own_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of this host that win over the coordinator's order, where they say anything."""
    settings = from_parameters(EngineSettings, given)
    values = {entry: getattr(settings, entry.name) for entry in entries(EngineSettings) if entry.host_wins}
    return {entry.name: value for entry, value in values.items() if value != entry.default}


def stage_telemetry(given: dict[str, Any]) -> Callable[[StageConfig, pb.JoinResponse], StageConfig]:
    """Return how a joining stage records: as its own flags say, and where they say nothing, as the order does."""
    own = {entry.name for entry in entries(TelemetrySettings) if is_given(entry.parameter)}
    mine, metrics = telemetry_config(given), given["metrics"]

    def adapt(config: StageConfig, order: pb.JoinResponse) -> StageConfig:
        theirs = order.telemetry
        telemetry = TelemetryConfig(
            level=mine.level if "level" in own else Level.from_wire(theirs.level) or mine.level,
            otlp_endpoint=mine.otlp_endpoint if "otlp_endpoint" in own else theirs.otlp_endpoint,
            sampler_ratio=mine.sampler_ratio if "sampler_ratio" in own else theirs.sampler_ratio,
        )
        # Plaintext never leaves loopback because a coordinator says so.
        host = config.host if config.security.is_tls else "127.0.0.1"
        ordered = (host, theirs.metrics_port) if theirs.metrics_port else None
        return dataclasses.replace(config, telemetry=telemetry, metrics=metrics or ordered)

    return adapt
