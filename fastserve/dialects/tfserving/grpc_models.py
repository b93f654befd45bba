"""GetModelMetadata, GetModelStatus and HandleReloadConfigRequest (spec 4.4)."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import ParseDict

from fastserve.config import ModelEntry
from fastserve.config.fields import convert
from fastserve.config.tensorflow_files import check_paths
from fastserve.dialects.tfserving.describe import find_versions, signature_def, status_of
from fastserve.dialects.tfserving.grpc_spec import fill_spec, find_model, target_of, tell
from fastserve.dialects.tfserving.routes import Target
from fastserve.dialects.tfserving.service import Service
from fastserve.errors import ConfigError, Kind, ServeError, invalid
from fastserve.protos import load
from fastserve.repository.catalog import Catalog

MESSAGES = load("tfserving")
SIGNATURE_DEF = "signature_def"
TYPE_URL = "type.googleapis.com/tensorflow.serving.SignatureDefMap"
PLATFORM = "tensorflow"
NOT_ALLOWED = "Replacing the models is disabled. Start the server with '--admin-reload-config' to enable."


class Models:
    """One method for each RPC: a request message in, a response message out. What raises is told."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def get_model_metadata(self, request: Any) -> Any:
        target = target_of(request)
        if not request.metadata_field:
            raise invalid("GetModelMetadataRequest must specify at least one metadata_field")
        for field in request.metadata_field:
            if field != SIGNATURE_DEF:
                raise invalid(f"Metadata field {field} is not supported")
        version = find_model(self._service.catalog, target)
        defs = {
            name: signature_def(signature, batching=version.batching)
            for name, signature in version.signatures.items()
        }
        described = ParseDict({"signature_def": defs}, MESSAGES.SignatureDefMap())
        response = MESSAGES.GetModelMetadataResponse()
        fill_spec(response.model_spec, version, None)
        held = response.metadata[SIGNATURE_DEF]
        held.type_url, held.value = TYPE_URL, described.SerializeToString()
        return response

    async def get_model_status(self, request: Any) -> Any:
        """Every version ever seen, highest first; a label is ignored."""
        target = target_of(request)
        found = find_versions(self._service.catalog, Target(target.name, target.version, None, ""))
        return ParseDict(status_of(found), MESSAGES.GetModelStatusResponse())

    async def reload_config(self, request: Any) -> Any:
        """Serve these models and no others; returns when they are there."""
        service = self._service
        if not service.admin.reload_config:
            raise ServeError(Kind.UNIMPLEMENTED, NOT_ALLOWED)
        entries = read_config(request.config, service.catalog)
        await service.repository.replace_models(entries)
        response = MESSAGES.ReloadConfigResponse()
        response.status.SetInParent()
        return response


def answering(run: Any) -> Any:
    """A method of `Models` as the transport calls it: faults are told as the original does."""

    async def answer(request: Any, rpc: object) -> Any:
        try:
            return await run(request)
        except ServeError as fault:
            raise tell(fault) from None

    return answer


# --- the list of models --------------------------------------------------------------------------


def read_config(config: Any, catalog: Catalog) -> list[ModelEntry]:
    """A ModelServerConfig. Raises ServeError for a list that cannot be, as a whole."""
    if config.WhichOneof("config") != "model_config_list":
        raise invalid(
            "ServerModelConfig type not supported by HandleReloadConfigRequest. "
            "Only ModelConfigList is currently supported"
        )
    given = config.model_config_list.config
    names: set[str] = set()
    for one in given:
        if one.name in names:
            raise invalid(f"Illegal to list model {one.name} multiple times in config list")
        names.add(one.name)
    try:
        check_paths([{"name": one.name, "base_path": one.base_path} for one in given])
    except ConfigError as fault:
        raise invalid(str(fault)) from None
    return [_read_model(number, one, catalog) for number, one in enumerate(given)]


def _read_model(number: int, given: Any, catalog: Catalog) -> ModelEntry:
    _check_platform(given, catalog)
    if given.HasField("logging_config"):
        raise invalid(f"logging_config of model {given.name}: logs of requests are not built")
    entry = {"name": given.name, "base_path": given.base_path, "version_policy": _policy(given)}
    entry["labels"] = dict(given.version_labels) or None
    try:
        return convert(entry, ModelEntry, f"model_config_list.config[{number}]")
    except ConfigError as fault:
        raise invalid(str(fault)) from None


def _check_platform(given: Any, catalog: Catalog) -> None:
    """One word stands for everything that is served here, as it does in the configuration file."""
    platform = given.model_platform
    if given.model_type:  # the field that came before it
        if platform:
            raise invalid(
                "Illegal setting both ModelServerConfig::model_type (deprecated) and "
                "ModelServerConfig::model_platform."
            )
        if given.model_type != MESSAGES.ModelType.Value("TENSORFLOW"):
            raise invalid(f"ModelServerConfig::model_type choice {given.model_type} not supported.")
        platform = PLATFORM
    if not platform:
        raise invalid(
            "Illegal setting neither ModelServerConfig::model_type (deprecated) nor "
            f"ModelServerConfig::model_platform, model name is {given.name}"
        )
    if platform == PLATFORM:
        return
    if catalog.available(given.name) is not None:
        raise invalid(
            f"Illegal to change a model's platform. For model {given.name} platform was {PLATFORM} and new "
            f"platform requested is {platform}"
        )
    raise invalid(f"Model {given.name} requests unsupported platform {platform}")


def _policy(given: Any) -> object:
    chosen = given.model_version_policy.WhichOneof("policy_choice")
    if chosen == "specific":
        return {"specific": list(given.model_version_policy.specific.versions)}
    if chosen == "latest":
        return {"latest": given.model_version_policy.latest.num_versions or 1}
    return chosen
