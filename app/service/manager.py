"""The service manager of this system, and whether its service has a port."""

import re
import sys
from getpass import getuser

from app.service.launchd import Launchd
from app.service.plan import Manager, ServicePlan
from app.service.systemd import Systemd
from app.service.task_scheduler import TaskScheduler
from app.settings.settings import Settings


def manager_of(settings: Settings, platform: str = sys.platform) -> Manager:
    """Return the service manager of a platform. It need not run on this machine."""
    plan = ServicePlan.of(settings)
    match platform:
        case "darwin":
            return Launchd(plan)
        case "win32":
            return TaskScheduler(plan, getuser())
    return Systemd(plan)


def service_has(port: int, settings: Settings) -> bool:
    """Whether the installed service listens on a port, by its files."""
    manager = manager_of(settings)
    if not manager.is_installed():  # `files` finds out on which addresses this machine can listen
        return False
    written = [file.path.read_text(file.encoding) for file in manager.files() if file.path.exists()]
    return any(re.search(rf"\b{port}\b", content) for content in written)
