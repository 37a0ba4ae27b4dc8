"""The API as OpenAPI 3.1, from the limits of a server and the table of problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vitral._version import __version__
from vitral.serving.limits import Limits
from vitral.serving.problems import PROBLEMS
from vitral.serving.service import Service

Fields = Mapping[str, tuple[dict[str, Any], str]]
"""Parameter → its schema and its description."""

_READING = (
    "bad-request",
    "unknown-parameter",
    "unknown-model",
    "slow-body",
    "body-too-large",
    "too-many-images",
    "unsupported-type",
    "unreadable-image",
    "queue-full",
    "deadline",
    "internal",
)
"""Problems of every request with images."""


def openapi(service: Service) -> dict[str, object]:
    """The description of a server: its limits, its methods of explanation, and if requests must carry a token."""
    limits, token = service.limits, service.access.needs_token
    fields = _fields(dict.fromkeys(str(one["name"]) for model in service.models.values() for one in model.methods))
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "vitral serve",
            "version": __version__,
            "description": "Predictions, explanations and features of images.",
        },
        "paths": _paths(limits, token, fields),
        "components": {"schemas": _schemas(limits), "parameters": _parameters(fields)},
    }
    if token:
        described["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return described


def _paths(limits: Limits, token: bool, fields: Fields) -> dict[str, object]:
    secured: dict[str, object] = {"security": [{"token": []}]} if token else {}
    denied = ("unauthorized",) if token else ()
    embedding = {name: fields[name] for name in ("model", "timeout")}
    return {
        "/v1/predict": {
            "post": {
                "summary": "Predict the classes, labels, numbers or text of one image or many",
                "operationId": "predict",
                **_with_images(limits, "Predictions", (*_READING, "no-explanation", *denied), fields),
                **secured,
            }
        },
        "/v1/embed": {
            "post": {
                "summary": "Compute the features of one image or many, as the head of the network reads them",
                "operationId": "embed",
                **_with_images(limits, "Embeddings", (*_READING, "no-embedding", *denied), embedding),
                **secured,
            }
        },
        "/v1/models": {"get": _get("List the models, the default first", "Models", denied) | secured},
        "/healthz": {"get": _get("Succeed while the process answers", "Status")},
        "/readyz": {"get": _get("Succeed while new requests are welcome", "Status", ("not-ready",))},
        "/metrics": {
            "get": {
                "summary": "Metrics for Prometheus",
                "responses": {
                    "200": {"description": "metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}
                }
                | _problems(denied),
                **secured,
            }
        },
    }


def _get(summary: str, schema: str, problems: tuple[str, ...] = ()) -> dict[str, object]:
    return {"summary": summary, "responses": {"200": _answer(schema), **_problems(problems)}}


def _with_images(limits: Limits, schema: str, problems: tuple[str, ...], parameters: Fields) -> dict[str, object]:
    file = {"type": "string", "contentMediaType": "application/octet-stream"}
    files = {"type": "array", "items": file, "minItems": 1, "maxItems": limits.images}
    fields = {name: schema for name, (schema, _) in parameters.items() if name != "timeout"}
    parts = _closed({"image": files, "images": files, **fields}, "anyOf")
    images = {name: _ref(name) for name in ("image", "images")}
    return {
        "description": f"At most {limits.images} images and {limits.body:,} bytes; {limits.pixels:,} pixels an image.",
        "parameters": [{"$ref": f"#/components/parameters/{name}"} for name in parameters],
        "requestBody": {
            "required": True,
            "content": {
                "image/*": {"schema": file},
                "multipart/form-data": {
                    "schema": parts,
                    "encoding": {name: {"contentType": "image/*"} for name in ("image", "images")},
                },
                "application/json": {"schema": _closed({**images, **fields}, "oneOf")},
            },
        },
        "responses": {"200": _answer(schema), **_problems(problems)},
    }


def _answer(schema: str) -> dict[str, object]:
    return {"description": "done", "content": {"application/json": {"schema": _ref(schema)}}}


def _problems(names: tuple[str, ...]) -> dict[str, object]:
    """Responses by status; problems of one status share an entry."""
    found: dict[str, Any] = {}
    for name in names:
        kind = PROBLEMS[name]
        entry = found.setdefault(str(kind.status), {"description": kind.title})
        if entry["description"] != kind.title:
            entry["description"] += f"; or: {kind.title[0].lower()}{kind.title[1:]}"
        entry["content"] = {"application/problem+json": {"schema": _ref("Problem")}}
        if name == "queue-full":
            entry["headers"] = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
    return dict(sorted(found.items()))


def _ref(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _closed(properties: Mapping[str, object], which: str) -> dict[str, object]:
    """An object without other properties, with `image` or `images`: one of them (`oneOf`), or both (`anyOf`)."""
    required = [{"required": ["image"]}, {"required": ["images"]}]
    return {"type": "object", "properties": properties, "additionalProperties": False, which: required}


def _fields(methods: Iterable[str]) -> Fields:
    """Parameters, which may also be fields of a body."""
    return {
        "model": ({"type": "string"}, "a name of /v1/models; by default the first"),
        "top": ({"type": "integer", "minimum": 1, "default": 5}, "classes or labels of each image, best first"),
        "explain": (
            {"type": "string", "enum": ["default", *methods]},
            "a method of /v1/models, or 'default': a heat map of the evidence",
        ),
        "target": ({"type": "string"}, "with explain, the class, label or number (default: the predicted one)"),
        "overlay": ({"type": "boolean", "default": False}, "with explain: draw the heat map over the image, as PNG"),
        "timeout": ({"type": "number", "exclusiveMinimum": 0}, "time limit in seconds; only in the query string"),
    }


def _parameters(fields: Fields) -> dict[str, object]:
    return {
        name: {"name": name, "in": "query", "schema": schema, "description": about}
        for name, (schema, about) in fields.items()
    }


def _object(*required: str, **properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": list(required or properties)}


def _list(items: Mapping[str, object]) -> dict[str, object]:
    return {"type": "array", "items": items}


def _schemas(limits: Limits) -> dict[str, object]:
    text, number, whole = {"type": "string"}, {"type": "number"}, {"type": "integer"}
    base64 = {"type": "string", "format": "byte", "contentEncoding": "base64", "minLength": 1}
    named = {**_object("data", name=text, data=base64), "additionalProperties": False}
    explanation = _object(
        "method",
        "label",
        "values",
        method=text,
        label=text,
        probability=number,
        value=number,
        note=text,
        values=_list(_list(number)),
        image=text,
        overlay=text,
    )
    top = _list(_object(**{"class": text, "probability": number}))
    prediction = _object(
        "image",
        "label",
        "confidence",
        "top",
        image=text,
        label=text,
        confidence=number,
        top=top,
        answer=text,
        unknown={"type": "boolean"},
        explanation=explanation,
    )
    found = _list(_object(label=text, probability=number, threshold=number))
    labels = _object("image", "labels", "top", image=text, labels=found, top=found, explanation=explanation)
    amounts = {"type": "object", "additionalProperties": number}
    numbers = _object("image", "numbers", image=text, numbers=amounts, explanation=explanation)
    characters = _list(_object(character=text, probability=number))
    looked = _list(
        _object("character", "values", character=text, probability=number, values=_list(_list(number)), overlay=text)
    )
    where = _object("method", "characters", method=text, note=text, characters=looked, image=text)
    written = _object(
        "image",
        "text",
        "confidence",
        image=text,
        text=text,
        confidence=number,
        characters=characters,
        explanation=where,
    )
    yes = {"type": "boolean"}
    method = _object(name=text, title=text, passes=whole, routing=yes, signed=yes, note=text)
    model = _object(
        name=text,
        version=text,
        loaded_at=text,
        task=text,
        noun=text,
        target=text,
        sure=text,
        preprocessing={"type": "object"},
        classes=_list(text),
        image_size=_list(whole),
        channels=whole,
        features=whole,
        parameters=whole,
        engine=text,
        precision=text,
        device=text,
        methods=_list(method),
    )
    bounds = _object(body=whole, images=whole, pixels=whole, explained=whole, timeout=number)
    kinds = [prediction, labels, numbers, written]
    return {
        "image": {"oneOf": [base64, named]},
        "images": {"type": "array", "items": _ref("image"), "minItems": 1, "maxItems": limits.images},
        "Predictions": _object(model=text, version=text, predictions=_list({"anyOf": kinds})),
        "Embeddings": _object(
            model=text, version=text, features=whole, embeddings=_list(_object(image=text, embedding=_list(number)))
        ),
        "Models": _object(models=_list(model), limits=bounds),
        "Status": _object("status", status=text, models=_list(text)),
        "Problem": _object(
            "type",
            "title",
            "status",
            "detail",
            "request_id",
            type=text,
            title=text,
            status=whole,
            detail=text,
            request_id=text,
            **{"try": text},
        ),
    }
