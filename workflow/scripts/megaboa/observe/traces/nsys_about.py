"""What an export of Nsight Systems says about itself: versions, rank, host, device, network cards, complaints."""

from __future__ import annotations

from typing import Any

from megaboa.observe.traces.findings import Finding
from megaboa.observe.traces.sqlite_file import Database

# The newest schema that the reader was tried with: Nsight Systems 2026.2 writes it (2023.4 writes 3.7).
KNOWN_SCHEMA = (3, 25)
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD_VARIABLES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
JOB_VARIABLES = ("SLURM_JOB_ID",)


def version(database: Database, where: str) -> tuple[str, list[Finding]]:
    meta = database.pairs("META_DATA_EXPORT")
    product = meta.get("EXPORT_PRODUCT_VERSION", "unknown")
    schema = tuple(integer(meta.get(f"EXPORT_SCHEMA_VERSION_{part}")) or 0 for part in ("MAJOR", "MINOR"))
    if schema <= KNOWN_SCHEMA:
        return product, []
    text = (
        f"written by Nsight Systems {product} (schema {schema[0]}.{schema[1]}), newer than the newest known "
        f"({KNOWN_SCHEMA[0]}.{KNOWN_SCHEMA[1]}): tables and columns were found by their names"
    )
    return product, [Finding("newer_version", "warning" if schema[0] > KNOWN_SCHEMA[0] else "note", where, text)]


def variables(database: Database) -> dict[str, str]:
    """Those of the profiled process that say which rank it is; a capture holds all, and no others are looked at."""
    if database.lacks("META_DATA_CAPTURE", "name", "value"):
        return {}
    wanted = (*RANK_VARIABLES, *WORLD_VARIABLES, *JOB_VARIABLES)
    rows = database.rows("SELECT value FROM META_DATA_CAPTURE WHERE name LIKE '%ENVIRONMENT_VARIABLE'")
    pairs = (value.partition("=") for (value,) in rows if value)
    return {name: text.strip('"') for name, _, text in pairs if name in wanted}


def first(found: dict[str, str], names: tuple[str, ...]) -> str | None:
    return next((found[name] for name in names if name in found), None)


def epoch(database: Database) -> int | None:
    """Time of day, in nanoseconds, at 0 of the capture's clock."""
    if database.lacks("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
        return None
    rows = database.rows("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME")
    return rows[0][0] if rows else None


def host(database: Database) -> str | None:
    named = database.pairs("TARGET_INFO_SYSTEM_ENV").get("Hostname")
    return named or database.pairs("META_DATA_CAPTURE").get("DEVICE_DISPLAY_NAME")


def device(database: Database) -> str | None:
    if database.lacks("TARGET_INFO_GPU", "name"):
        return None
    return " / ".join(sorted({name for (name,) in database.rows("SELECT name FROM TARGET_INFO_GPU") if name})) or None


def network(database: Database) -> list[dict[str, Any]]:
    """Every counter of a network card: mean and largest sample."""
    metrics = ("TARGET_INFO_NETWORK_METRICS", "metricsListId", "metricsIdx", "name", "unit")
    if database.lacks("NET_NIC_METRIC", "globalId", "value") or database.lacks(*metrics):
        return []
    query = (
        "SELECT m.globalId, t.name, t.unit, COUNT(*), AVG(m.value), MAX(m.value) FROM NET_NIC_METRIC m "
        "JOIN TARGET_INFO_NETWORK_METRICS t USING (metricsListId, metricsIdx) "
        "GROUP BY m.globalId, t.name, t.unit ORDER BY t.name, m.globalId"
    )
    keys = ("card", "metric", "unit", "n", "mean", "max")
    return [dict(zip(keys, row, strict=True)) for row in database.rows(query)]


def diagnostics(database: Database, where: str) -> list[Finding]:
    """What Nsight Systems itself had to complain about."""
    if database.lacks("DIAGNOSTIC_EVENT", "severity", "text"):
        return []
    texts = database.rows("SELECT DISTINCT text FROM DIAGNOSTIC_EVENT WHERE severity > 1 LIMIT 5")
    return [Finding("diagnostic", "warning", where, f"Nsight Systems said: {text}") for (text,) in texts]


def integer(text: Any) -> int | None:
    try:
        return int(text)
    except (TypeError, ValueError):
        return None
