"""What the vendor may still change."""
