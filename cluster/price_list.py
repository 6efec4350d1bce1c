"""`cluster prices`: show every price with its date and source, or fetch EC2's on-demand prices anew."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import yaml

from cluster.core import prices
from cluster.core.errors import InfraError
from cluster.core.tables import columns

SOURCE = "AWS Price List API, GetProducts: Linux, shared tenancy, on demand"


def run(refresh: bool, as_json: bool) -> int:
    if refresh:
        write(refreshed(prices.catalogue()))
        prices.catalogue.cache_clear()
    found = prices.catalogue()
    print(json.dumps(found, indent=1) if as_json else as_text(found))
    return 0


def as_text(found: dict[str, Any]) -> str:
    parts = []
    for group, content in found.items():
        region = f", {content['region']}" if "region" in content else ""
        rows = [(name, f"{price:g}") for name, price in flat(content)]
        parts.append(f"{group} ({content['date']}{region}): {content['source']}\n{columns(('', 'USD'), rows)}")
        parts += [f"{name}: price of {when}, AWS lists none" for name, when in content.get("older", {}).items()]
    return "\n\n".join(parts)


def flat(content: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    out: list[tuple[str, float]] = []
    for name, value in content.items():
        if isinstance(value, dict):
            out += flat(value, prefix if name == "usd_per_hour" else f"{prefix}{name} ")
        elif not isinstance(value, str):
            out.append((f"{prefix}{name}", value))
    return out


def refreshed(found: dict[str, Any], client: Any = None) -> dict[str, Any]:
    """The catalogue with today's on-demand prices. A type that AWS no longer lists keeps its price and its date."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    group = found["ec2_on_demand"]
    usd, older = dict(group["usd_per_hour"]), dict(group.get("older", {}))
    try:
        # The API answers for all regions, in a few of them.
        client = client or boto3.client("pricing", region_name="us-east-1")
        for name in prices.types():
            price = on_demand(client, name, group["region"])
            if price is None:
                older.setdefault(name, group["date"])
            else:
                usd[name] = price
                older.pop(name, None)
    except (BotoCoreError, ClientError) as error:
        raise InfraError(f"prices: AWS did not answer: {error}; the catalogue is unchanged") from None
    new = {**group, "date": datetime.now(UTC).date().isoformat(), "source": SOURCE, "usd_per_hour": usd}
    new.pop("older", None)
    return {**found, "ec2_on_demand": {**new, "older": older} if older else new}


def on_demand(client: Any, instance_type: str, region: str) -> float | None:
    """USD per hour as the Price List API has it; None where it lists no such product."""
    wanted = {
        "instanceType": instance_type,
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    answer = client.get_products(ServiceCode="AmazonEC2", Filters=filters, FormatVersion="aws_v1")
    found = {
        float(dimension["pricePerUnit"]["USD"])
        for product in map(json.loads, answer["PriceList"])
        for term in product["terms"].get("OnDemand", {}).values()
        for dimension in term["priceDimensions"].values()
        if dimension["unit"] == "Hrs" and float(dimension["pricePerUnit"].get("USD", 0)) > 0
    }
    if len(found) > 1:
        listed = ", ".join(f"{price:g}" for price in sorted(found))
        raise InfraError(f"prices: AWS lists several prices for {instance_type} in {region}: {listed}")
    return found.pop() if found else None


def write(content: dict[str, Any]) -> None:
    comment = prices.PRICES.read_text().split("\n", 1)[0]
    part = prices.PRICES.with_suffix(".part")
    try:
        part.write_text(f"{comment}\n{yaml.safe_dump(content, sort_keys=False, width=120)}")
        part.replace(prices.PRICES)
    except OSError as error:
        raise InfraError(f"prices: cannot write {prices.PRICES}: {error.strerror}") from None
