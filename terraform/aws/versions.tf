# The provider comes from the registry or from a mirror found at run time; the lock file fits both.
terraform {
  required_version = ">= 1.7"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.100"
    }
  }
}

provider "aws" {
  region = local.aws.region
  # The provider repeats a call that found no capacity. Its default, 25 times, takes hours in which the other nodes are
  # billed; 6 times take up to a minute, which throttled calls need.
  max_retries = 6
  default_tags {
    tags = local.tags
  }
}
