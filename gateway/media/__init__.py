"""Media in requests: read out of data URLs, base64 and, where it is allowed, URLs; bounded before they are decoded."""
