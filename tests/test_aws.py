"""The CloudFormation template and the commands of docs/aws.md.

Tests with the marker `aws` lint the template, and run the commands of the page with the AWS CLI on an emulated AWS (moto). The
emulator ignores placement groups and rules for outgoing traffic, ignores `Rules` and `AllowedPattern`, accepts any instance type,
gives no public address to an interface of a launch template, starts no machine and mounts nothing. Other tests read the template.
"""

import base64
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import yaml

from accel_ddp.launch.description import read_description
from tests.conftest import ROOT, clean_environment, free_port

TEMPLATE = ROOT / "docs" / "aws" / "cluster.cfn.yaml"
PAGE = ROOT / "docs" / "aws.md"
INSTALL = "python3 -m venv build/aws && build/aws/bin/pip install awscli cfn-lint 'moto[server]'"


class Loader(yaml.SafeLoader):
    """Reads `!Name value` as {"!Name": value}."""


def read_tag(loader, suffix, node):
    kinds = {yaml.ScalarNode: loader.construct_scalar, yaml.SequenceNode: loader.construct_sequence}
    deep = {} if isinstance(node, yaml.ScalarNode) else {"deep": True}
    return {f"!{suffix}": kinds[type(node)](node, **deep)}


Loader.add_multi_constructor("!", read_tag)


@pytest.fixture(scope="module")
def template() -> dict:
    return yaml.load(TEMPLATE.read_text(), Loader=Loader)


def command(part: str) -> str:
    """Return the block of the page that contains a text."""
    (found,) = [
        text for text in re.findall(r"^```bash parsed\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE) if part in text
    ]
    return found


# ---- the template


def test_only_networks_from_a_known_place_may_connect(template):
    parameter = template["Parameters"]["SshFrom"]
    assert "Default" not in parameter, "it must be given"
    is_allowed = lambda text: re.search(parameter["AllowedPattern"], text) is not None
    for text in ("203.0.113.7/32", "10.0.0.0/16", "192.168.1.0/24", "255.255.255.255/32"):
        assert is_allowed(text), text
    for text in ("0.0.0.0/0", "0.0.0.0/1", "128.0.0.0/1", "10.0.0.0/8", "10.0.0.0/15", "203.0.113.7", "", "::/0", "256.1.1.1/32",
                 "203.0.113.7/33", "203.0.113.7/32,0.0.0.0/0", "203.0.113.7/32 0.0.0.0/0", "x203.0.113.7/32"):  # fmt: skip
        assert not is_allowed(text), text


def test_members_of_the_security_group_reach_each_other_and_nothing_else_but_ssh_is_open(template):
    """The emulator ignores the rule for outgoing traffic to the group itself, without which EFA does not work."""
    resources = template["Resources"]
    itself = {"!Ref": "NodeSecurityGroup"}
    assert [name for name, one in resources.items() if one["Type"] == "AWS::EC2::SecurityGroup"] == ["NodeSecurityGroup"]
    plain = lambda rule: {key: value for key, value in rule.items() if key != "Description"}
    (ssh,) = resources["NodeSecurityGroup"]["Properties"]["SecurityGroupIngress"]
    assert plain(ssh) == {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "CidrIp": {"!Ref": "SshFrom"}}
    for kind, other in (("Ingress", "SourceSecurityGroupId"), ("Egress", "DestinationSecurityGroupId")):
        (rule,) = [one["Properties"] for one in resources.values() if one["Type"] == f"AWS::EC2::SecurityGroup{kind}"]
        assert plain(rule) == {"GroupId": itself, "IpProtocol": "-1", other: itself}, kind
    interfaces = resources["NodeTemplate"]["Properties"]["LaunchTemplateData"]["NetworkInterfaces"]
    assert str(interfaces).count("'Groups'") == str(interfaces).count(str([itself])) == 4, "of every interface"
    assert resources["FilesInSubnet"]["Properties"]["SecurityGroups"] == [itself]


def test_nodes_are_in_one_subnet_and_one_placement_group(template):
    group = template["Resources"]["Nodes"]["Properties"]
    assert group["VPCZoneIdentifier"] == [{"!If": ["NewVpc", {"!Ref": "Subnet"}, {"!Ref": "SubnetId"}]}]
    assert group["VPCZoneIdentifier"] == [template["Resources"]["FilesInSubnet"]["Properties"]["SubnetId"]]
    assert group["PlacementGroup"] == {"!Ref": "Placement"}
    assert template["Resources"]["Placement"]["Properties"] == {"Strategy": "cluster"}


@pytest.mark.parametrize(
    ("given", "broken"),
    [
        ({}, []),
        ({"VpcId": "vpc-1", "SubnetId": "subnet-1"}, []),
        ({"VpcId": "vpc-1", "SubnetId": "subnet-1", "PublicAddresses": "no", "EfaInterfaces": 4}, []),
        ({"VpcId": "vpc-1"}, ["VpcHasSubnet"]),
        ({"SubnetId": "subnet-1"}, ["SubnetHasVpc"]),
        ({"PublicAddresses": "no"}, ["NewSubnetsArePublic"]),
        ({"EfaInterfaces": 4}, ["SeveralInterfacesHaveNoPublicAddress"]),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(given, broken, template):
    values = {name: one.get("Default") for name, one in template["Parameters"].items()} | given

    def result(node):
        if not isinstance(node, dict):
            return str(node)
        ((name, of),) = node.items()
        if name == "!Ref":
            return str(values[of])
        return result(of[0]) == result(of[1]) if name == "!Equals" else not result(of[0])

    applies = [(name, rule) for name, rule in template["Rules"].items() if result(rule["RuleCondition"])]
    assert [name for name, rule in applies if not all(result(one["Assert"]) for one in rule["Assertions"])] == broken


# ---- the script that sets up a node


def run_setup(folder: Path, template: dict, failing: str = "", has_code: bool = False) -> list[str]:
    """Run the script with stand-ins for the programs of Amazon Linux, which `failing` names one of. Return what they were given."""
    text, names = template["Resources"]["NodeTemplate"]["Properties"]["LaunchTemplateData"]["UserData"]["Fn::Base64"]["!Sub"]
    for name, value in {"AWS::StackName": "ddp", "AWS::Region": "us-east-1", **dict.fromkeys(names, "fs-1")}.items():
        text = text.replace(f"${{{name}}}", value)
    text = re.sub(r"(?<![\w.])/(data|opt|etc)\b", rf"{folder}/\1", text)
    programs = folder / "programs"
    for path in (programs, folder / "etc", folder / "opt" / "aws" / "bin", folder / "opt" / "accel_ddp" / "bin"):
        path.mkdir(parents=True)
    stand_in = f'#!/bin/bash\necho "${{0##*/}} $*" >> {folder}/calls\n'
    own = {
        "mount": f"[ $(grep -c '^mount ' {folder}/calls) -gt 2 ]\n",  # the name of the mount target appears late
        "install": f"mkdir -p {folder}/data/code\n" + (f"touch {folder}/data/code/pyproject.toml\n" if has_code else ""),
        "runuser": 'shift 3\nexec "$@"\n',
    }
    for name in ("dnf", "mount", "mountpoint", "install", "runuser", "sleep", "python3.12", "systemd-run"):
        (programs / name).write_text(stand_in + ("exit 7\n" if name == failing else own.get(name, "")))
    (folder / "opt" / "aws" / "bin" / "cfn-signal").write_text(stand_in)
    (folder / "opt" / "accel_ddp" / "bin" / "pip").write_text(stand_in)
    for path in [*programs.iterdir(), *folder.glob("opt/*/bin/*")]:
        path.chmod(0o755)
    (folder / "script").write_text(text)
    environment = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", folder / "script"], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == (not failing), done.stderr
    return (folder / "calls").read_text().replace(str(folder), "").splitlines()


def test_a_node_mounts_the_shared_disk_and_reports_that_it_is_ready(tmp_path, template):
    calls = run_setup(tmp_path, template)
    assert (tmp_path / "etc" / "fstab").read_text() == f"fs-1:/ {tmp_path}/data efs _netdev,noresvport,tls 0 0\n"
    assert [call for call in calls if call.startswith(("mount", "sleep"))] == [
        *["mount /data", "sleep 10"] * 2, "mount /data", "mountpoint /data",
    ]  # fmt: skip
    assert calls[-2:] == [
        "python3.12 -m venv /opt/accel_ddp",
        "cfn-signal --exit-code 0 --stack ddp --resource Nodes --region us-east-1",
    ]


def test_a_node_that_finds_the_code_installs_it(tmp_path, template):
    calls = run_setup(tmp_path, template, has_code=True)
    assert calls[-2] == "pip install -q -c /data/code/constraints.txt -e /data/code[demo]"
    assert "--exit-code 0 " in calls[-1]


@pytest.mark.parametrize("failing", ["dnf", "mountpoint", "python3.12"])
def test_a_node_that_cannot_be_set_up_reports_the_exit_code(failing, tmp_path, template):
    calls = run_setup(tmp_path, template, failing)
    assert calls[-1] == "cfn-signal --exit-code 7 --stack ddp --resource Nodes --region us-east-1"


def test_the_resource_that_receives_the_report_waits_for_every_node(template):
    group = template["Resources"]["Nodes"]
    assert group["CreationPolicy"]["ResourceSignal"]["Count"] == {"!Ref": "NodeCount"} == group["Properties"]["DesiredCapacity"]


# ---- the commands of the page


def test_host_keys_are_taken_from_the_console(tmp_path):
    """The part of the command after `aws`, with a console as cloud-init writes it."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "root@node", "-f", tmp_path / "host"], check=True)
    kind, key, comment = (tmp_path / "host.pub").read_text().split()
    fingerprint = subprocess.run(["ssh-keygen", "-lf", tmp_path / "host.pub"], capture_output=True, text=True).stdout.strip()
    console = "\r\n".join(
        ["[   12.3] cloud-init[1]: Cloud-init v. 22.2.2 running", "<14>Nov 16 12:00:00 cloud-init: #####",
         "<14>Nov 16 12:00:00 cloud-init: -----BEGIN SSH HOST KEY FINGERPRINTS-----", f"<14>Nov 16 12:00:00 cloud-init: {fingerprint}",
         "<14>Nov 16 12:00:00 cloud-init: -----END SSH HOST KEY FINGERPRINTS-----", "-----BEGIN SSH HOST KEY KEYS-----",
         "ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTY= root@node", f"{kind} {key} {comment}",
         "-----END SSH HOST KEY KEYS-----", f"{kind} {key} {comment}", ""]
    )  # fmt: skip
    pipe = re.search(r"--query Output \|\n(.*?) >> ~/.ssh/known_hosts", command("get-console-output"), re.DOTALL)[1]
    known = subprocess.run(["bash", "-ec", f"address=203.0.113.20; {pipe}"], input=console, capture_output=True, text=True).stdout
    assert known == f"203.0.113.20 {kind} {key}\n"
    (tmp_path / "known_hosts").write_text(known)
    found = subprocess.run(
        ["ssh-keygen", "-F", "203.0.113.20", "-f", tmp_path / "known_hosts", "-l"], capture_output=True, text=True
    )
    assert fingerprint.split()[1] in found.stdout, "ssh reads the file"


def test_the_copy_has_the_code_and_neither_ignored_files_nor_secrets(tmp_path):
    """With a local folder as the first node. The second command of the block needs a node."""
    here, there = tmp_path / "here", tmp_path / "data" / "work"
    kept = [".git/HEAD", "pyproject.toml", "recipes/classify.py"]
    for name in [*kept, ".env", ".venv/pyvenv.cfg", "runs/model", "build/aws/big", "recipes/__pycache__/classify.pyc"]:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("")
    shutil.copy(ROOT / ".gitignore", here)
    shutil.copytree(here, there, ignore=lambda *_: [".env", ".venv", "runs", "build", "recipes"])  # an earlier copy
    for name in ("removed.py", "recipes/__pycache__/of_a_node.pyc"):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text("")
    (here / "cluster.yaml").write_text("backend: ssh\nnodes:\n  - ec2-user@203.0.113.20\n  - ec2-user@203.0.113.21\n")
    copy = command("rsync").splitlines()[0]
    assert copy.endswith(':/data/code/"')
    host = subprocess.run(["bash", "-ec", f"echo {copy[copy.index(chr(34)) :]}"], cwd=here, capture_output=True, text=True).stdout
    assert host == "ec2-user@203.0.113.20:/data/code/\n"
    subprocess.run(["bash", "-ec", f"{copy[: copy.index(chr(34))]} {there}/"], cwd=here, check=True)
    found = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    assert found == {*kept, ".gitignore", "cluster.yaml", "recipes/__pycache__/of_a_node.pyc"}


class Cloud:
    """An emulated AWS with a key pair and an image, and a folder with the template."""

    def __init__(self, folder: Path, port: int):
        self.folder = folder
        outside = {name: value for name, value in clean_environment().items() if not name.startswith("AWS_")}
        self.env = outside | {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true", "AWS_PAGER": "",
        }  # fmt: skip
        # The emulator has no Deep Learning AMI, and does not allow to add its parameter.
        default = yaml.load(TEMPLATE.read_text(), Loader=Loader)["Parameters"]["ImageId"]["Default"]
        (folder / "docs" / "aws").mkdir(parents=True)
        (folder / "docs" / "aws" / TEMPLATE.name).write_text(TEMPLATE.read_text().replace(default, "/image"))

    def reset(self) -> None:
        address = self.env["AWS_ENDPOINT_URL"] + "/moto-api/reset"
        urllib.request.urlopen(urllib.request.Request(address, method="POST"), timeout=30).close()
        self.ask("ec2 create-key-pair --key-name my-key")
        image = self.ask("ec2 describe-images --owners amazon")["Images"][0]["ImageId"]
        self.ask(f"ssm put-parameter --type String --name /image --value {image}")

    def run(self, text: str) -> str:
        done = subprocess.run(["bash", "-ec", text], env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def ask(self, words: str) -> dict:
        return json.loads(self.run(f"aws {words} --output json") or "{}")

    def create(self, *parameters: str, stack: str = "ddp") -> None:
        """Run the command of the page with more parameters."""
        words = [f"ParameterKey={name},ParameterValue={value}" for name, value in (one.split("=") for one in parameters)]
        text = (
            command("create-stack").replace("/32\n", f"/32 {' '.join(words)}\n").replace("stack-name ddp", f"stack-name {stack}")
        )
        assert all(word in text for word in words)
        self.run(text)

    def outputs(self, stack: str = "ddp") -> dict[str, str]:
        (found,) = self.ask(f"cloudformation describe-stacks --stack-name {stack}")["Stacks"]
        assert found["StackStatus"] == "CREATE_COMPLETE"
        return {one["OutputKey"]: one["OutputValue"] for one in found["Outputs"]}

    def instances(self, stack: str = "ddp") -> list[dict]:
        filters = f"Name=tag:accel-ddp-cluster,Values={stack} Name=instance-state-name,Values=running"
        return [
            one for some in self.ask(f"ec2 describe-instances --filters {filters}")["Reservations"] for one in some["Instances"]
        ]

    def launch_template(self) -> dict:
        """Return the contents of the newest launch template."""
        name = self.ask("ec2 describe-launch-templates")["LaunchTemplates"][-1]["LaunchTemplateId"]
        versions = self.ask(f"ec2 describe-launch-template-versions --launch-template-id {name}")["LaunchTemplateVersions"]
        return versions[0]["LaunchTemplateData"]

    def subnet(self, block: str) -> tuple[str, str]:
        """Create a network as a user may have it, in another zone than the first. Return its VPC and its subnet."""
        vpc = self.ask(f"ec2 create-vpc --cidr-block {block}")["Vpc"]["VpcId"]
        made = self.ask(f"ec2 create-subnet --vpc-id {vpc} --cidr-block {block} --availability-zone us-east-1c")["Subnet"][
            "SubnetId"
        ]
        self.run(f"aws ec2 modify-subnet-attribute --subnet-id {made} --map-public-ip-on-launch")
        return vpc, made


def required(program: str) -> str:
    found = shutil.which(program, path=clean_environment()["PATH"])
    return found or pytest.skip(f"{program} is not installed. Run: {INSTALL} && PATH=$PWD/build/aws/bin:$PATH pytest -m aws")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    required("aws")
    folder, port = tmp_path_factory.mktemp("aws"), free_port()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([required("moto_server"), "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
        try:
            limit = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < limit, "the emulator does not listen"
                time.sleep(0.1)
            yield Cloud(folder, port)
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture
def cloud(server) -> Cloud:
    server.reset()
    return server


@pytest.mark.aws
def test_the_template_is_created_with_the_commands_of_the_page(cloud):
    cloud.create()
    outputs = cloud.outputs()
    # What the emulator does not create is tested above, in the template.
    skipped = set(re.findall(r"No Moto CloudFormation support for (\S+)", (cloud.folder / "log").read_text()))
    assert skipped == {"AWS::EC2::PlacementGroup", "AWS::EC2::SecurityGroupEgress"}

    (group,) = cloud.ask(f"ec2 describe-security-groups --group-ids {outputs['SecurityGroup']}")["SecurityGroups"]
    rules = {
        (rule["IpProtocol"], rule.get("FromPort"), rule.get("ToPort"), *(one["CidrIp"] for one in rule["IpRanges"]),
         *(one["GroupId"] for one in rule["UserIdGroupPairs"]), *rule["Ipv6Ranges"], *rule["PrefixListIds"])
        for rule in group["IpPermissions"]
    }  # fmt: skip
    assert rules == {("tcp", 22, 22, "203.0.113.7/32"), ("-1", None, None, outputs["SecurityGroup"])}

    nodes = cloud.instances()
    assert [node["InstanceType"] for node in nodes] == ["g5.12xlarge"] * 2
    assert {node["Placement"]["AvailabilityZone"] for node in nodes} == {"us-east-1a"}
    assert {node["VpcId"] for node in nodes} == {group["VpcId"]}
    assert {node["KeyName"] for node in nodes} == {"my-key"}

    (files,) = cloud.ask(f"efs describe-file-systems --file-system-id {outputs['FileSystem']}")["FileSystems"]
    assert files["Encrypted"]
    assert files["ThroughputMode"] == "elastic"
    (target,) = cloud.ask(f"efs describe-mount-targets --file-system-id {outputs['FileSystem']}")["MountTargets"]
    assert {target["SubnetId"]} == {node["SubnetId"] for node in nodes}
    groups = cloud.ask(f"efs describe-mount-target-security-groups --mount-target-id {target['MountTargetId']}")["SecurityGroups"]
    assert groups == [outputs["SecurityGroup"]]

    made = cloud.launch_template()
    assert made["MetadataOptions"]["HttpTokens"] == "required"
    assert made["BlockDeviceMappings"][0]["Ebs"] == {
        "VolumeSize": 150, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True,
    }  # fmt: skip
    assert made["NetworkInterfaces"] == [
        {"DeviceIndex": 0, "NetworkCardIndex": 0, "InterfaceType": "interface", "AssociatePublicIpAddress": True,
         "DeleteOnTermination": True, "Groups": [outputs["SecurityGroup"]]}
    ]  # fmt: skip
    assert "InstanceMarketOptions" not in made
    script = base64.b64decode(made["UserData"]).decode()
    assert f"{outputs['FileSystem']}:/ /data efs" in script
    assert "--stack ddp --resource Nodes --region us-east-1" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)

    pause = command("set-desired-capacity")
    cloud.run(pause)
    assert not cloud.instances()
    cloud.run(pause.replace("--desired-capacity 0", "--desired-capacity 2"))
    assert len(cloud.instances()) == 2
    assert cloud.run(command("StackEvents")) is not None


@pytest.mark.aws
def test_the_query_writes_a_description_and_everything_is_deleted(cloud):
    """In an existing network, because the emulator does not delete route tables of a stack."""
    vpc, subnet = cloud.subnet("10.1.0.0/24")
    cloud.create(f"VpcId={vpc}", f"SubnetId={subnet}", "UseSpot=yes", "EfaInterfaces=1")
    made = cloud.launch_template()
    assert made["InstanceMarketOptions"]["MarketType"] == "spot"
    assert made["InstanceMarketOptions"]["SpotOptions"]["SpotInstanceType"] == "one-time"
    (interface,) = made["NetworkInterfaces"]
    assert (interface["InterfaceType"], interface["AssociatePublicIpAddress"]) == ("efa", True)

    cloud.create("NodeCount=1", f"VpcId={vpc}", f"SubnetId={subnet}", stack="other")  # whose node must not be in the file
    write = command("> cluster.yaml")
    cloud.run(write)
    cluster = read_description(cloud.folder / "cluster.yaml")
    nodes = {f"ec2-user@{one['PublicIpAddress']}": one["PrivateIpAddress"] for one in cloud.instances()}
    assert {node.host for node in cluster.nodes} == set(nodes)
    assert cluster.main_address == nodes[cluster.nodes[0].host] == min(nodes.values())
    values = [(node.gpus, node.processes, node.folder, node.venv) for node in cluster.nodes]
    assert values == [(4, 4, "/data/code", "/opt/accel_ddp")] * 2
    assert (cluster.backend, cluster.output, cluster.copy) == ("ssh", "/data/runs", "none")
    example = re.search(r"^```text\n(backend: .*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]
    hide = lambda text: re.sub(r"\d+(\.\d+){3}", "ADDRESS", text)
    assert hide((cloud.folder / "cluster.yaml").read_text()) == hide(example), "the page shows what is written"
    commands = cloud.run(command("--dry_run"))
    assert hide(f"```text\n{commands}```") in hide(PAGE.read_text()), "and what runs on the nodes"
    assert commands.count(f"--main_process_ip {cluster.main_address} ") == 2

    cloud.run(write.replace("PublicIpAddress", "PrivateIpAddress"))
    assert sorted(node.host for node in read_description(cloud.folder / "cluster.yaml").nodes) == [
        f"ec2-user@{address}" for address in sorted(nodes.values())
    ]

    left = command("Name=tag-key,Values=accel-ddp-cluster")
    assert len(cloud.run(left).split()) == 3 + 2, "nodes and file systems"
    delete = command("delete-stack")
    cloud.run(delete)
    cloud.run(delete.replace("stack-name ddp", "stack-name other"))
    assert cloud.run(left).split() == []
    assert not cloud.ask("autoscaling describe-auto-scaling-groups")["AutoScalingGroups"]
    groups = cloud.ask(f"ec2 describe-security-groups --filters Name=vpc-id,Values={vpc}")["SecurityGroups"]
    assert [one["GroupName"] for one in groups] == ["default"]


@pytest.mark.aws
def test_files_outlive_a_stack_and_a_later_one_uses_them(cloud):
    vpc, subnet = cloud.subnet("10.1.0.0/24")
    cloud.create(f"VpcId={vpc}", f"SubnetId={subnet}")
    files = cloud.outputs()["FileSystem"]
    cloud.run(command("delete-stack").replace("aws efs delete-file-system", "true"))
    (kept,) = cloud.ask("efs describe-file-systems")["FileSystems"]
    assert (kept["FileSystemId"], kept["NumberOfMountTargets"]) == (files, 0)
    given = [f"VpcId={vpc}", f"SubnetId={subnet}", f"FileSystemId={files}", "PublicAddresses=no", "EfaInterfaces=4"]
    cloud.create(*given, stack="again")
    assert cloud.outputs("again")["FileSystem"] == files
    assert len(cloud.ask("efs describe-file-systems")["FileSystems"]) == 1
    made = cloud.launch_template()
    assert f"{files}:/ /data efs" in base64.b64decode(made["UserData"]).decode()
    cards = [(one["NetworkCardIndex"], one["DeviceIndex"], one["InterfaceType"]) for one in made["NetworkInterfaces"]]
    assert cards == [(0, 0, "efa"), (1, 1, "efa"), (2, 1, "efa"), (3, 1, "efa")]
    assert not any("AssociatePublicIpAddress" in one for one in made["NetworkInterfaces"])


# Each replaces a text of the template by a mistake, which has this name in the message of the linter.
MISTAKES = [
    ("ThroughputMode: elastic", "ThroughputMod: elastic", "ThroughputMod"),
    ("Strategy: cluster", "Strategy: clusterr", "clusterr"),
    ("SourceSecurityGroupId: !Ref NodeSecurityGroup", "SourceSecurityGroupId: !Ref NodeGroup", "NodeGroup"),
    ("HttpTokens: required", "HttpTokens: require", "require"),
    ("{MarketType: spot", "{MarketType: sport", "sport"),
    ("NodeTemplate.LatestVersionNumber", "NodeTemplate.LatestVersion", "LatestVersion"),
    ("Condition: NewFiles", "Condition: NewFile", "NewFile"),
    ("VolumeType: gp3", "VolumeType: gp33", "gp33"),
    ("${FileSystem}:/", "${FileSystems}:/", "FileSystems"),
    ("    Type: AWS::EFS::MountTarget", "    Type: AWS::EFS::MountTargets", "MountTargets"),
    ("DependsOn: [FilesInSubnet,", "DependsOn: [FileInSubnet,", "FileInSubnet"),
]


@pytest.mark.aws
def test_the_linter_finds_nothing_in_the_template_and_every_planted_mistake(tmp_path):
    lint = required("cfn-lint")
    done = subprocess.run([lint, TEMPLATE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for number, (right, wrong, _) in enumerate(MISTAKES):
        text = TEMPLATE.read_text()
        assert text.count(right) == 1, right
        (tmp_path / f"{number}.yaml").write_text(text.replace(right, wrong))
    files = [str(tmp_path / f"{number}.yaml") for number in range(len(MISTAKES))]
    done = subprocess.run([lint, "--format", "json", *files], capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    for file, (_, _, name) in zip(files, MISTAKES):
        assert any(one["Filename"] == file and name in one["Message"] for one in found), (name, found)
