"""Leaves out the tests in a browser on machines that have none."""

from tests.support.browser import browser_program

collect_ignore = [] if browser_program() else ["test_in_browser.py"]
