"""What can end training with NaN or Inf, found before its second step."""
