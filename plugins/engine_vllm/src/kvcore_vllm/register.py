"""The entry point `kvcore` of the group `vllm.general_plugins`. vLLM calls it in every one of its processes."""

import logging

NAME = "KVCoreConnector"
MODULE = "kvcore_vllm.connector"


def register() -> None:
    """Make the connector known to vLLM by name, without importing it. Idempotent; never raises."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if NAME not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except Exception:
        logging.getLogger("kvcore").exception("%s could not be registered with vLLM", NAME)
