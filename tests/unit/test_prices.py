"""`cluster prices`: one catalogue, and its refresh against a stub that answers as AWS documents.

Nobody has run the refresh against AWS itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import boto3
import pytest
import yaml
from botocore.stub import ANY, Stubber

from bench.catalogue import gpu_rates
from bench.parse import TRANSPORTS
from cluster import cli, price_list
from cluster.core import prices
from cluster.core.errors import InfraError, UserError


@pytest.fixture
def catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copied = tmp_path / "prices.yml"
    copied.write_text(prices.PRICES.read_text())
    monkeypatch.setattr(prices, "PRICES", copied)
    prices.catalogue.cache_clear()
    yield copied
    prices.catalogue.cache_clear()


@pytest.fixture
def two_types(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: prices.types()[name] for name in ("g4dn.xlarge", "p3.2xlarge")}
    monkeypatch.setattr(prices, "types", lambda: known)


def product(usd: str, *more: str) -> str:
    """An element of PriceList: a JSON document in a string, with the parts of the documented answer that we read."""
    terms = {
        f"SKU.TERM{number}": {
            "offerTermCode": "JRTCKXETXF",
            "priceDimensions": {f"SKU.TERM{number}.RATE": {"unit": "Hrs", "pricePerUnit": {"USD": price}}},
            "termAttributes": {},
        }
        for number, price in enumerate((usd, *more))
    }
    attributes = {"instanceType": "g4dn.xlarge", "regionCode": "us-east-1", "operatingSystem": "Linux"}
    return json.dumps(
        {
            "product": {"productFamily": "Compute Instance", "attributes": attributes, "sku": "SKU"},
            "serviceCode": "AmazonEC2",
            "terms": {"OnDemand": terms},
        }
    )


def client(*answers: list[str]):
    made = boto3.client("pricing", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    stub = Stubber(made)
    asked = {"ServiceCode": "AmazonEC2", "Filters": ANY, "FormatVersion": "aws_v1"}
    for found in answers:
        stub.add_response("get_products", {"FormatVersion": "aws_v1", "PriceList": found}, asked)
    stub.activate()
    return made


@pytest.mark.usefixtures("two_types")
def test_refresh_writes_the_price_with_its_date_and_keeps_what_aws_no_longer_lists(
    catalogue: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    before = yaml.safe_load(catalogue.read_text())
    made = client([product("0.6660000000")], [])
    monkeypatch.setattr(boto3, "client", lambda *_, **__: made)
    assert cli.main(["prices", "--refresh"]) == 0
    after = yaml.safe_load(catalogue.read_text())
    group = after.pop("ec2_on_demand")
    assert group["usd_per_hour"]["g4dn.xlarge"] == 0.666
    assert group["usd_per_hour"]["p3.2xlarge"] == before["ec2_on_demand"]["usd_per_hour"]["p3.2xlarge"]
    assert group["older"] == {"p3.2xlarge": before["ec2_on_demand"]["date"]}
    assert group["date"] > before["ec2_on_demand"]["date"] and "Price List API" in group["source"]
    del before["ec2_on_demand"]
    assert after == before
    assert catalogue.read_text().startswith("# ")
    assert prices.instance_per_hour("g4dn.xlarge") == 0.666
    assert "p3.2xlarge: price of 2025-07" in capsys.readouterr().out


@pytest.mark.usefixtures("two_types")
def test_refresh_asks_for_one_product(catalogue: Path) -> None:
    made = boto3.client("pricing", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    filters = {
        **{"instanceType": "g4dn.xlarge", "regionCode": "us-east-1", "operatingSystem": "Linux"},
        **{"tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used"},
    }
    asked = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in filters.items()]
    with Stubber(made) as stub:
        wanted = {"ServiceCode": "AmazonEC2", "Filters": asked, "FormatVersion": "aws_v1"}
        stub.add_response("get_products", {"PriceList": [product("0.5", "0.0000000000")]}, wanted)
        # A price of 0 belongs to reserved capacity and is no price.
        assert price_list.on_demand(made, "g4dn.xlarge", "us-east-1") == 0.5


def test_several_prices_for_one_type_are_refused() -> None:
    with pytest.raises(InfraError, match=r"several prices for g4dn.xlarge in us-east-1: 0.5, 0.6"):
        price_list.on_demand(client([product("0.5", "0.6")]), "g4dn.xlarge", "us-east-1")


def test_refused_credentials_leave_the_catalogue_and_exit_3(
    catalogue: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    made = boto3.client("pricing", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    stub = Stubber(made)
    stub.add_client_error("get_products", "AccessDeniedException", "not yours", 400)
    stub.activate()
    monkeypatch.setattr(boto3, "client", lambda *_, **__: made)
    before = catalogue.read_bytes()
    assert cli.main(["prices", "--refresh"]) == 3
    error = capsys.readouterr().err
    assert "the catalogue is unchanged" in error and error.count("\n") == 1
    assert catalogue.read_bytes() == before


def test_missing_credentials_leave_the_catalogue_and_exit_3(
    catalogue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    before = catalogue.read_bytes()
    assert cli.main(["prices", "--refresh"]) == 3
    assert capsys.readouterr().err.count("\n") == 1
    assert catalogue.read_bytes() == before


def test_every_group_shows_its_date_and_source(catalogue: Path, capsys) -> None:
    assert cli.main(["prices"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["prices", "--json"]) == 0
    for name, group in json.loads(capsys.readouterr().out).items():
        assert f"{name} ({group['date']}" in text and group["source"] in text


def test_every_instance_type_gpu_and_port_has_a_price() -> None:
    assert all(prices.instance_per_hour(name) > 0 for name in prices.types())
    assert all(prices.gpu_per_hour(name) > 0 for name in gpu_rates.PROFILES)
    assert {transport for transport, _ in prices.port_per_hour()} <= set(TRANSPORTS)


def test_type_without_a_price_is_named() -> None:
    with pytest.raises(UserError, match=r"x9\.huge: no price"):
        prices.instance_per_hour("x9.huge")
