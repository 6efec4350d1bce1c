"""Calls to AWS: their errors as one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from cluster.core.errors import InfraError

CREDENTIALS = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run `aws configure`"


@contextmanager
def aws_call(what: str) -> Iterator[None]:
    """Report an error of boto3 as one line."""
    try:
        yield
    except NoCredentialsError:
        raise InfraError(f"AWS: no credentials; {CREDENTIALS}") from None
    except (BotoCoreError, ClientError) as error:
        raise InfraError(f"AWS: {what}: {' '.join(str(error).split())}") from None
