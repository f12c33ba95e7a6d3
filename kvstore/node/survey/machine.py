"""Everything that is looked at, in order."""

from kvstore.node.sections import Config
from kvstore.node.survey.devices import survey_devices
from kvstore.node.survey.finding import Finding
from kvstore.node.survey.memory import survey_memory
from kvstore.node.survey.services import survey_ports, survey_redis
from kvstore.node.survey.transfer import survey_transfer


async def survey_machine(config: Config, *, transfer: bool = True) -> list[Finding]:
    """Looks at this machine as a node with this configuration would use it. Changes nothing; takes some seconds.

    Args:
        config: complete.
        transfer: whether Mooncake is tried, too.
    """
    return [
        *survey_devices(config),
        *survey_memory(config),
        await survey_redis(config),
        *survey_ports(config),
        *([survey_transfer(config)] if transfer else []),
    ]
