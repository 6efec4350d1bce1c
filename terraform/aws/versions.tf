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
  default_tags {
    tags = local.tags
  }
}
