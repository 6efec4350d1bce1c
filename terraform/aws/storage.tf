# A bucket for training data, for the nodes only. destroy removes it with its content.
resource "aws_s3_bucket" "data" {
  count         = local.aws.data_bucket == null ? 0 : 1
  bucket        = local.aws.data_bucket
  force_destroy = true

  depends_on = [aws_vpc.cluster]
}

resource "aws_s3_bucket_public_access_block" "data" {
  count                   = length(aws_s3_bucket.data)
  bucket                  = aws_s3_bucket.data[0].id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_server_side_encryption_configuration" "data" {
  count  = length(aws_s3_bucket.data)
  bucket = aws_s3_bucket.data[0].id

  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm = "aws:kms"
    }
  }
}

resource "aws_iam_role" "node" {
  count = length(aws_s3_bucket.data)
  name  = "${local.cluster.name}-node"
  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Action = "sts:AssumeRole", Principal = { Service = "ec2.amazonaws.com" } }]
  })

  depends_on = [aws_vpc.cluster]
}

resource "aws_iam_role_policy" "data" {
  count = length(aws_s3_bucket.data)
  name  = "data"
  role  = aws_iam_role.node[0].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      { Effect = "Allow", Action = ["s3:ListBucket"], Resource = [aws_s3_bucket.data[0].arn] },
      { Effect = "Allow", Action = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"], Resource = ["${aws_s3_bucket.data[0].arn}/*"] },
    ]
  })
}

resource "aws_iam_instance_profile" "node" {
  count = length(aws_s3_bucket.data)
  name  = "${local.cluster.name}-node"
  role  = aws_iam_role.node[0].name
}
