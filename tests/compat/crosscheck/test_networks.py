"""Whole networks agree in torch and in JAX, cut anywhere, and the page that says so."""

import pytest

from .. import agreement


def agrees(network, cuts):
    report = agreement.checked(network, cuts)
    report.assert_agrees()
    net, _ = agreement.NETWORKS[network]()
    every = agreement.CUTS[cuts]
    assert report.kept_torch.regions == (-(-len(net.steps) // every) if every else 0)
    for d in report.differences.values():
        assert d.torch_ulps < 200
        assert d.jax_ulps < 200
    return report


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_network_agrees():
    report = agrees("MLP", "every 2 steps")
    assert report.kept_torch.activations > 0
    assert report.runs["grad"].products.torch_recomputed > 0


@pytest.mark.sweep
@pytest.mark.parametrize("network", agreement.NETWORKS)
@pytest.mark.parametrize("cuts", agreement.CUTS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_all_networks_agree(network, cuts):
    agrees(network, cuts)


def test_the_page_has_all_networks_and_cuts():
    text = agreement.PAGE.read_text()
    for network in agreement.NETWORKS:
        for cuts in agreement.CUTS:
            (line,) = [x for x in text.splitlines() if x.startswith(f"| {network}, {cuts} |")]
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            assert len(cells) == len(agreement.HEAD)
            kept_torch, kept_jax = cells[5], cells[6]
            assert kept_torch == kept_jax
