"""Manifests made by hypothesis, from the model itself: a new field there appears here without a change."""

from __future__ import annotations

import json
import types
import typing
from typing import Any

import annotated_types
import pydantic
from hypothesis import assume
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from relayline.deploy.machine.cores import CORE_MAX, write_cores
from relayline.deploy.manifest import Manifest, Stage
from relayline.deploy.manifest.model import API_VERSION, KIND, STAGES_MAX, Metadata, Spec
from relayline.deploy.manifest.scalars import Part
from relayline.wire.model_files.adapter_texts import SCALE_MAX, AdapterText, text_of

# Printable and not, from several scripts, and text that YAML reads as another type; no control characters.
TEXT = st.one_of(
    st.sampled_from(
        ("null", "off", "No", "1e3", "0o17", "8:30", "- a", "a: b", "#x", "'", '"', "{", "é", "\u2028", "~")
    ),
    st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12),
)

ADAPTER = st.builds(
    AdapterText,
    st.sampled_from(("", "sql", "a.b-c_1")),
    st.sampled_from(("style.gguf", "/models/\u00e9 #1.gguf", "null", "a:b=c.gguf")),
    st.one_of(st.floats(-SCALE_MAX, -1e-9), st.floats(1e-9, SCALE_MAX)),
).filter(lambda each: bool(each.name) or "=" not in each.path)  # what stands before a = is read as the name
# Of settings whose text has a form that no pattern says, by their last name in a manifest.
FORMS = {
    "devices": st.sampled_from(("", "CUDA0", "CUDA0,CUDA1", "none")),
    "tensorSplit": st.sampled_from(("", "3,1")),
    "overrideTensor": st.sampled_from(("", "ffn_.*_exps=CPU")),
    "jaegerUrl": st.sampled_from(("", "http://box:16686/jaeger")),
    "reasoningBudgetMessage": st.sampled_from(("", "That is enough.\\n")),
    "mediaHosts": st.sampled_from(("", "*", "example.org,*.example.com")),
    "lora": st.one_of(
        st.just(""),
        st.lists(ADAPTER, min_size=1, unique_by=lambda each: each.name).map(lambda each: text_of(tuple(each))),
    ),
}


def manifests(stages_max: int = STAGES_MAX) -> st.SearchStrategy[Manifest]:
    """Valid manifests, with every field sometimes, but for `spares` and `relay`, which no rendered deployment has."""
    return st.builds(_manifest, _part(Metadata), _part(Spec, without=("stages", "spares")), _stages(stages_max))


def _manifest(metadata: dict[str, Any], spec: dict[str, Any], stages: Any) -> Manifest:
    model = spec["model"]
    if model.get("hf") is not None:
        model.pop("path", None)
    elif model.get("path") is None:
        model["path"] = "model.gguf"
    if "path" in model:
        model.pop("download", None)  # of a model of the hub
    deployment = spec.get("deployment") or {}
    if "tolerations" in deployment:
        deployment["tolerations"] = [_toleration(each) for each in deployment["tolerations"]]
    (deployment.get("storage") or {}).pop("fill", None)  # a file with the name of model.path
    data = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec | {"stages": stages}}
    try:
        return Manifest.model_validate_json(json.dumps(data), strict=True, by_alias=True, by_name=False)
    except pydantic.ValidationError as error:
        # The strategies rule out everything but ports that are the same by chance.
        assume("is taken by" not in str(error))
        raise


def _toleration(drawn: dict[str, Any]) -> dict[str, Any]:
    """Drop fields that Kubernetes does not accept together."""
    if drawn.get("operator") == "Exists":
        drawn.pop("value", None)
    elif drawn.get("key") is None:
        drawn["key"] = "dedicated"
    if drawn.get("effect") != "NoExecute":
        drawn.pop("tolerationSeconds", None)
    return drawn


@st.composite
def _stages(draw: st.DrawFn, stages_max: int) -> Any:
    if draw(st.booleans()):
        return draw(st.integers(1, stages_max))
    stages = draw(
        st.lists(
            _part(Stage, without=("layers", "cores", "relay")),
            min_size=1,
            max_size=min(4, stages_max),
            unique_by=lambda s: s["name"],
        )
    )
    end = 0
    for stage in stages:
        if stage.get("device", "cpu") == "cpu":
            stage.pop("gpuLayers", None)
        if "tolerations" in stage:
            stage["tolerations"] = [_toleration(each) for each in stage["tolerations"]]
        start, end = end, end + draw(st.integers(1, 40))
        stage["layers"] = draw(st.sampled_from(["auto", [start, end]]))
        if draw(st.booleans()):
            listed = st.sets(st.integers(0, CORE_MAX), min_size=1, max_size=6).map(write_cores)
            stage["cores"] = draw(st.one_of(st.sampled_from(["auto", "any"]), listed))
    return stages


def _part(part: type[Part], without: tuple[str, ...] = ()) -> st.SearchStrategy[dict[str, Any]]:
    """A mapping of one part: required fields always, the others now and then."""
    required, optional = {}, {}
    for name, field in part.model_fields.items():
        if name not in without:
            alias = field.alias or name
            (required if field.is_required() else optional)[alias] = FORMS[alias] if alias in FORMS else _field(field)
    return st.fixed_dictionaries(required, optional=optional)


def _field(field: FieldInfo) -> st.SearchStrategy[Any]:
    return _value(field.annotation, tuple(field.metadata))


def _value(annotation: Any, metadata: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Values of a type with its constraints, as JSON has them."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and arguments[1:] == (...,):
        return st.lists(_value(arguments[0]), max_size=3)
    if origin is typing.Annotated:
        base, *more = arguments
        flat = [item for extra in more for item in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        return _value(base, (*flat, *metadata))
    if origin in (typing.Union, types.UnionType):
        return st.one_of([_value(argument, metadata) for argument in arguments])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is dict:
        return st.dictionaries(_value(arguments[0]), _value(arguments[1]), max_size=3)
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return _part(annotation)
    plain = {bool: st.booleans, type(None): st.none, int: _integer, float: _float, str: _string}
    maker = plain[annotation]
    return maker(metadata) if annotation in (int, float, str) else maker()


def _limits(metadata: tuple[Any, ...]) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    for item in metadata:
        match item:
            case annotated_types.Ge(ge=low):
                limits["min_value"] = low
            case annotated_types.Gt(gt=low):
                limits |= {"min_value": low, "exclude_min": True}
            case annotated_types.Le(le=high):
                limits["max_value"] = high
    return limits


def _integer(metadata: tuple[Any, ...]) -> st.SearchStrategy[int]:
    return st.integers(**_limits(metadata))


def _float(metadata: tuple[Any, ...]) -> st.SearchStrategy[float]:
    return st.floats(**_limits(metadata), allow_nan=False, allow_infinity=False)


def _string(metadata: tuple[Any, ...]) -> st.SearchStrategy[str]:
    patterns = [item.pattern for item in metadata if getattr(item, "pattern", None)]
    smallest = max((item.min_length for item in metadata if isinstance(item, annotated_types.MinLen)), default=0)
    if not patterns or patterns[0].startswith(r"^[^\x00"):
        return TEXT.filter(lambda text: len(text) >= smallest)
    return st.from_regex(patterns[0].replace("^", r"\A", 1).removesuffix("$") + r"\Z").filter(str.isascii)
