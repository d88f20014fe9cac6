"""What `relayline up` of a gateway compares a pipeline behind it with: its manifest of now, as `up` would start it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yarl import URL

from relayline.deploy.cli.stage_flags import with_usual_stages
from relayline.deploy.launch.companions import with_companions
from relayline.deploy.launch.context import with_running_context
from relayline.deploy.launch.gateway.plan import own_of_replica
from relayline.deploy.launch.here import at_home
from relayline.deploy.launch.lanes import with_usual_lanes
from relayline.deploy.launch.prepare import named, override
from relayline.deploy.launch.run import Launch
from relayline.deploy.machine.ports import LOCALHOST
from relayline.deploy.manifest import load_manifest
from relayline.deploy.manifest.settings import open_context

if TYPE_CHECKING:
    from relayline.deploy.launch.gateway.plan import GatewayPlan
    from relayline.deploy.launch.state import StateDir
    from relayline.deploy.manifest.gateway import Member


def wanted_behind(plan: GatewayPlan, member: Member) -> tuple[Launch, StateDir]:
    """Return a pipeline that runs for the gateway as its manifest wants it now, and its state.

    It is made as `up_launch.launch_of` makes it, or `up` would find changes where there are none.
    """
    assert member.manifest is not None
    directory = plan.started.state_of(member.name)
    state, wanted = directory.load(), load_manifest(member.manifest)
    changes: dict[str, Any] = {"coordinator.http.tls": None, "coordinator.http.host": LOCALHOST}
    if state is not None and state.url:
        changes["coordinator.http.port"] = URL(state.url).port
    changes |= own_of_replica(wanted, member)
    if directory.manifest.exists():
        ports, own = load_manifest(directory.manifest).spec.coordinator, wanted.spec.coordinator
        changes["coordinator.joinPort"] = own.join_port or ports.join_port
        changes["coordinator.enrolPort"] = own.enrol_port or ports.enrol_port
        if relay_port := own.relay_port or ports.relay_port:
            changes["coordinator.relayPort"] = relay_port
    manifest = named(at_home(with_usual_lanes(override(wanted, changes))), f"{plan.name}-{member.name}")
    manifest = with_companions(manifest, (wanted.spec.model.hf or "") if wanted.serving.mmproj else "")
    manifest = with_running_context(with_usual_stages(manifest), open_context(wanted.spec), directory.path)
    return Launch(manifest, member.manifest.absolute(), plan.started.log_flags), directory
