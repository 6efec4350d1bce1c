output "cluster" {
  description = "the contract between Terraform, Ansible and bench"
  value       = module.contract.cluster
}
