# Only Terraform's built-in provider: nothing to download.
terraform {
  required_version = ">= 1.7"
}
