"""Numbers out of a Prometheus page."""

from prometheus_client.parser import text_string_to_metric_families


def total(page: str, name: str, labels: dict[str, str]) -> float:
    """The sum of a metric's samples that carry these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
