"""Configuration: authored in YAML, checked, resolved once into messages of the contract."""

from omnid.config.deploy import DeployConfig
from omnid.config.errors import ConfigError, Place, Problem
from omnid.config.files import load_deploy, load_pipeline, shipped_deploys, shipped_pipelines
from omnid.config.overrides import override
from omnid.config.pipeline import PipelineConfig
from omnid.config.present import absent_checkpoints, unread_arguments
from omnid.config.resolve import resolve

__all__ = [
    "ConfigError",
    "DeployConfig",
    "PipelineConfig",
    "Place",
    "Problem",
    "absent_checkpoints",
    "load_deploy",
    "load_pipeline",
    "override",
    "resolve",
    "shipped_deploys",
    "shipped_pipelines",
    "unread_arguments",
]
