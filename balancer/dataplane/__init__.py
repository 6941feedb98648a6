"""The proxied paths: from a client's request over its legs to its answer's last byte."""
