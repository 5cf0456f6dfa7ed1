"""The entry point `kvcore` of the group `vllm.general_plugins`. vLLM calls it in every one of its processes."""

import logging

NAME = "KVCoreConnector"
MODULE = "kvcore_vllm.connector"
TIER = "kvcore"
"""The `type` of the secondary tier, in the `secondary_tiers` of vLLM's `TieringOffloadingSpec`."""
TIER_NAME = "KVCoreTier"
TIER_MODULE = "kvcore_vllm.tier"


def register() -> None:
    """Make the connector and the tier known to vLLM by name, without importing them. Idempotent; never raises."""
    for name, make_known in ((NAME, _connector), (TIER_NAME, _tier)):
        try:
            make_known()
        except Exception:
            logging.getLogger("kvcore").exception("%s could not be registered with vLLM", name)


def _connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)


def _tier() -> None:
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if TIER not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(TIER, TIER_MODULE, TIER_NAME)
