"""What stands around a cluster: storage servers, monitoring, racks, cooling, and the network's bill of materials.
The cluster planner calls it; every line is a figure of the sheet with its formula."""

from cumulo.plan.cluster.sheet import Sheet

STORAGE = (
    "storage_servers", "storage_capacity", "checkpoint_files", "metadata_rate", "checkpoint_storm", "restore_storm",
    "startup_bytes", "startup_s", "startup_tree_s",
)  # fmt: skip
MONITORING = ("metric_samples", "metric_bytes", "metric_day", "log_day", "monitoring_servers")
MATERIALS = ("cards", "switches", "cables", "transceivers", "network_w")
COOLING = ("machines_w", "facility_w", "cooling_w", "heat_w", "racks", "water_day")


def storage_sheet(sheet: Sheet, tier: str) -> None:
    """`tier`: the key of the way in which checkpoints are kept, whose interval sets the rate."""
    sheet.work_out(
        "checkpoint_storm",
        f"checkpoint_bytes / max(interval_{tier}_s, {'flush' if tier == 'partner' else 'write_s'}) / 1e9",
        "GB/s",
        "storage bandwidth that checkpoints ask for",
        "those in the memory of nodes go to storage now and then" if tier == "partner" else "",
    )
    sheet.work_out(
        "restore_storm",
        "checkpoint_bytes / write_s / 1e9",
        "GB/s",
        "storage bandwidth while a restarted job reads its checkpoint",
    )
    sheet.work_out(
        "storage_servers",
        "ceil(storage / server_rate)",
        "servers",
        "storage servers, for the bandwidth that the plan counts on",
    )
    sheet.work_out(
        "storage_capacity",
        "kept_checkpoints * checkpoint_bytes + tokens * token_bytes",
        "bytes",
        "storage capacity: checkpoints that are kept, and the data",
    )
    sheet.work_out(
        "checkpoint_files", "job_gpus", "files", "files of a checkpoint", "each GPU writes its own part"
    )
    sheet.work_out(
        "metadata_rate",
        "checkpoint_files / max(write_s, storm)",
        "files/s",
        "metadata rate while all parts are created",
    )
    sheet.work_out(
        "startup_bytes", "job_nodes * image * 1e9", "bytes", "software that a start brings to all nodes"
    )
    sheet.work_out(
        "startup_s", "startup_bytes / (storage * 1e9)", "s", "start-up storm: all nodes read it from storage"
    )
    sheet.work_out(
        "startup_tree_s",
        "image * 1e9 / nic_bytes_per_s * log2(max(2, job_nodes))",
        "s",
        "start-up if nodes pass it on in a tree",
    )


def monitoring_sheet(sheet: Sheet) -> None:
    sheet.work_out("metric_samples", "gpus * series / scrape", "samples/s", "monitoring: samples")
    sheet.work_out(
        "metric_bytes", "metric_samples * 2", "bytes/s", "monitoring: written", "2 B a sample, compressed"
    )
    sheet.work_out("metric_day", "metric_bytes * 86400", "bytes", "monitoring: a day of metrics")
    sheet.work_out("log_day", "nodes * node_logs * 1e9", "bytes", "monitoring: a day of logs")
    sheet.work_out(
        "monitoring_servers",
        "ceil(metric_samples / 1e6)",
        "servers",
        "monitoring servers",
        "a million samples/s each, as one Prometheus takes",
    )


def cooling_sheet(sheet: Sheet) -> None:
    sheet.work_out("cooling_w", "facility_w - machines_w", "W", "power of cooling and conversion")
    sheet.work_out("heat_w", "machines_w", "W", "heat to remove", "all of the machines' power becomes heat")
    sheet.work_out("racks", "ceil(machines_w / (rack * 1e3))", "racks", "racks")
    sheet.work_out(
        "water_day", "machines_w / 1e3 * 24 * water / 1e3", "m³", "water evaporated in a day, if cooled by it"
    )


def materials_sheet(sheet: Sheet) -> None:
    sheet.work_out("transceivers", "2 * cables", "transceivers", "transceivers, two to a cable")
