"""The page /docs: the description of the API (/openapi.json) as plain HTML.

FastAPI's own page loads scripts from another host, and a storage node may reach none. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

METHODS = ("get", "put", "post", "delete")


def render_docs_page(description: Mapping[str, Any]) -> str:
    """HTML for an OpenAPI document: every route with its parameters and the shape of its body."""
    title = escape(str(description["info"]["title"]))
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        '<link rel="stylesheet" href="/static/style.css"></head><body><main>',
        f"<h1>{title}</h1>",
        "<p>Each request for data carries the header <code>Authorization: Bearer TOKEN</code>, with"
        " what is in the token file. A fault is answered with"
        ' <code>{"error", "given", "expected"}</code>. The same for programs:'
        ' <a href="/openapi.json">/openapi.json</a></p>',
        *_render_routes(description["paths"]),
        "<h2>Bodies</h2>",
        *_render_schemas(description.get("components", {}).get("schemas", {})),
        "</main></body></html>",
    ]
    return "\n".join(parts)


def _render_routes(paths: Mapping[str, Any]) -> Iterator[str]:
    for path, operations in paths.items():
        for method in METHODS:
            if method in operations:
                yield from _render_route(path, method, operations[method])


def _render_route(path: str, method: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h3><code>{method.upper()} {escape(path)}</code></h3>"
    summary, description = operation.get("summary", ""), operation.get("description", "")
    yield f"<p>{escape(summary)}. {escape(description)}</p>"
    for parameter in operation.get("parameters", ()):
        name, place = escape(parameter["name"]), escape(parameter["in"])
        yield f"<p><code>{name}</code> in the {place}: {_shape(parameter.get('schema', {}))}</p>"
    content = operation.get("requestBody", {}).get("content", {})
    for kind in content.values():
        yield f"<p>Body: {_shape(kind.get('schema', {}))}</p>"


def _render_schemas(schemas: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in schemas.items():
        yield f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3>'
        yield f"<p>{escape(schema.get('description', ''))}</p><ul>"
        required = schema.get("required", ())
        for field, shape in schema.get("properties", {}).items():
            need = "" if field in required else ", may be left out"
            yield f"<li><code>{escape(field)}</code>: {_shape(shape)}{need}</li>"
        yield "</ul>"


def _shape(schema: Mapping[str, Any]) -> str:
    """One line for a schema: a link to a named one, else its type and its limits."""
    if "$ref" in schema:
        name = escape(str(schema["$ref"]).rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return " or ".join(_shape(one) for one in schema[choice])
    limits = {
        key: value
        for key, value in schema.items()
        if key in ("const", "default", "minimum", "maximum", "exclusiveMinimum")
    }
    kind = escape(str(schema.get("type", "any")))
    return f"{kind} {escape(json.dumps(limits))}" if limits else kind
