"""The entry point of the group `vllm.general_plugins`: makes the connectors known to vLLM by name.

vLLM calls `register` in the API server, the engine process and every worker. It may know vLLM's factory and nothing
else: an error here would keep a server from starting that does not even use kvledger.
"""

import logging

CONNECTORS = {
    "KVLedgerStoreConnector": "connector.store.connector",
    "KVLedgerMooncakeConnector": "connector.pd.connector",
}
"""Connector names for `kv_connector`, and the modules that hold the classes."""


def register() -> None:
    """Register every connector with vLLM, once for each process. The modules are imported when a connector is used."""
    # vLLM gives handlers to loggers below its own only; kvledger's lines belong in the same place.
    logging.getLogger("kvledger").parent = logging.getLogger("vllm")
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415 - see above

    for name, module in CONNECTORS.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
