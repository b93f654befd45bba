"""A URL's model, version or label -> the version that answers, with TensorFlow Serving's texts (spec 1.7)."""

from __future__ import annotations

from fastserve.dialects.tfserving.errors import invalid
from fastserve.dialects.tfserving.routes import Target
from fastserve.errors import Kind, ServeError
from fastserve.repository.catalog import Catalog
from fastserve.repository.signature import DEFAULT_SIGNATURE, Signature
from fastserve.repository.version import Version


def find_version(catalog: Catalog, target: Target) -> Version:
    """The available version a target names. Raises ServeError; an unknown label is 400, model or not."""
    if target.label is not None:
        version = catalog.labelled(target.name, target.label)
        if version is None:
            raise invalid(f"Unrecognized servable version label: {target.label}")
        return version
    version = catalog.available(target.name, target.version)
    if version is None:
        wanted = (
            f"Latest({target.name})"
            if target.version is None
            else f"Specific({target.name}, {target.version})"
        )
        raise ServeError(Kind.NOT_FOUND, f"Servable not found for request: {wanted}")
    return version


def find_predict_signature(version: Version, name: str) -> Signature:
    """The signature of that name, "" for the default one. Raises ServeError in the words of Predict."""
    signature = version.signatures.get(name or DEFAULT_SIGNATURE)
    if signature is None:
        raise no_signature(name)
    if not signature.inputs:
        raise no_inputs(name)
    return signature


def find_example_signature(version: Version, name: str) -> Signature:
    """The same in the words of Classify and Regress."""
    signature = version.signatures.get(name or DEFAULT_SIGNATURE)
    if signature is None:
        raise invalid(f"No signature was found with the name: {name or DEFAULT_SIGNATURE}")
    return signature


def no_signature(name: str) -> ServeError:
    """What Predict answers for a signature nobody knows."""
    return invalid(f'Serving signature name: "{name or DEFAULT_SIGNATURE}" not found in signature def')


def no_inputs(name: str) -> ServeError:
    """What Predict answers for a signature that takes nothing."""
    return invalid(f"Failed to get input map for signature: {name or 'DEFAULT'}")
