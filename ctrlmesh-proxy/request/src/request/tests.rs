use super::*;

fn info<'a>(method: &'a str, target: &'a str) -> RequestInfo<'a> {
    RequestInfo::parse(method, target).unwrap()
}

/// Verb, group, namespace, resource, name and subresource, as one line.
fn asked(method: &str, target: &str) -> String {
    let info = info(method, target);
    let parts = [info.verb(), info.api_group(), info.namespace(), info.resource(), info.name(), info.subresource()];
    parts.join(" ")
}

#[test]
fn resources_are_found_in_every_shape_of_path() {
    for (method, target, wanted) in [
        ("GET", "/api/v1/pods", "list   pods  "),
        ("GET", "/api/v1/namespaces/ns/pods/a", "get  ns pods a "),
        ("PATCH", "/api/v1/namespaces/ns/pods/a/status", "patch  ns pods a status"),
        ("GET", "/apis/apps/v1/deployments", "list apps  deployments  "),
        ("DELETE", "/apis/apps/v1/namespaces/ns/deployments", "deletecollection apps ns deployments  "),
        ("GET", "/api/v1/namespaces/ns", "get  ns namespaces ns "),
        ("PUT", "/api/v1/namespaces/ns/finalize", "update  ns namespaces ns finalize"),
        ("GET", "/api/v1/watch/namespaces/ns/pods", "watch  ns pods  "),
        ("GET", "/api/v1/watch/pods/a", "watch   pods a "),
        ("GET", "/api/v1/proxy/namespaces/ns/pods/a/b", "proxy  ns pods a "),
        ("get", "/api/v1/pods", "   pods  "),
        ("POST", "/api/v1/namespaces/ns/pods?labelSelector=a", "create  ns pods  "),
    ] {
        assert_eq!(asked(method, target), wanted, "{method} {target}");
    }
}

#[test]
fn other_paths_are_no_resources() {
    for target in ["/", "/healthz", "/api", "/api/v1", "/apis/apps", "/apis/apps/v1", "/version?watch", "*"] {
        assert!(!info("GET", target).is_resource_request(), "{target}");
    }
}

#[test]
fn a_watch_is_whatever_is_not_false() {
    for (query, verb) in [
        ("watch", "watch"),
        ("watch=", "watch"),
        ("watch=1", "watch"),
        ("watch=no", "watch"),
        ("w%61tch=true", "watch"),
        ("watch=0", "list"),
        ("watch=FALSE", "list"),
        ("watch=fal%C5%BFe", "list"),
        ("watch=false&watch=true", "list"),
        ("watch=tr;ue", "list"),
        ("watch=%zz", "list"),
        ("Watch=true", "list"),
        ("watch=true&limit=x", "watch"),
    ] {
        let target = format!("/api/v1/pods?{query}");
        assert_eq!(info("GET", &target).verb(), verb, "{query}");
    }
}

#[test]
fn a_field_selector_may_name_the_object() {
    for (selector, name) in [
        ("metadata.name=a", "a"),
        ("metadata.name==a,spec.x!=y", "a"),
        ("metadata.name!=a", ""),
        ("metadata.name=b,metadata.name=a", "a"),
        ("metadata.name=a%5C%2Cb", "a,b"),
        ("metadata.name=a%2Fb", ""),
        ("metadata.name=..", ""),
        ("metadata.name=a=b", ""),
        ("metadata.name=a,x", ""),
    ] {
        let target = format!("/api/v1/pods?fieldSelector={selector}");
        assert_eq!(info("GET", &target).name(), name, "{selector}");
    }
}

#[test]
fn what_the_server_refuses_is_refused() {
    for (method, target) in [
        ("GET", ""),
        ("GET", "pods"),
        ("GET", "/api/v1/pods%2"),
        ("GET", "/api/v1/po ds"),
        ("G(T", "/"),
        ("GET", "http://[::1/"),
        ("GET", "http://a:b:1/"),
        ("GET", "http://a%41/"),
        ("GET", ":/"),
        ("GET", "/api/v1/watch"),
    ] {
        assert!(RequestInfo::parse(method, target).is_err(), "{method} {target}");
    }
}

#[test]
fn a_plain_target_is_not_copied() {
    let info = info("GET", "/api/v1/namespaces/ns/pods?labelSelector=a");
    assert!(matches!(info.path, Cow::Borrowed(_)) && matches!(info.label_selector, Some(Cow::Borrowed(_))));
}

#[test]
fn the_object_of_a_path_is_named_whatever_its_scope() {
    let object = |target: &str| {
        let ObjectKey { group, resource, namespace, name, .. } = RequestInfo::parse("PUT", target).unwrap().object();
        [group, resource, namespace, name].join("|")
    };
    for (target, expected) in [
        ("/apis/apps/v1/namespaces/a/deployments/x/status", "apps|deployments|a|x"),
        ("/api/v1/namespaces/a/configmaps", "|configmaps|a|"),
        ("/api/v1/nodes/n", "|nodes||n"),
        ("/api/v1/namespaces/a", "|namespaces||a"),
        ("/api/v1/namespaces/a/finalize", "|namespaces||a"),
    ] {
        assert_eq!(object(target), expected, "{target}");
    }
}

/// Templates, a path of each, and its member.
const MEMBERS: [(&str, &str, &str); 3] = [
    (
        "/apis/cluster.karmada.io/v1alpha1/clusters/{cluster}/proxy",
        "/apis/cluster.karmada.io/v1alpha1/clusters/m-1/proxy",
        "m-1",
    ),
    ("/clusters/{cluster}", "/clusters/root:org", "root:org"),
    ("/gateways/{namespace}/{cluster}", "/gateways/ocm/m%2D1", "m-1"),
];

#[test]
fn a_request_to_a_member_is_read_as_the_member_reads_it() {
    for (template, path, member) in MEMBERS {
        let templates = [template.parse().unwrap()];
        for behind in [
            "",
            "/",
            "/version",
            "/api/v1/pods?watch=1&labelSelector=a%3Db",
            "/api/v1/namespaces/ns/pods/a/log?follow=true",
            "/api/v1/watch/namespaces/ns/pods",
            "/api/v1/namespaces/n%2Fs/pods",
            "/apis/apps/v1/namespaces/ns/deployments?fieldSelector=metadata.name=a",
            "/api/v1/proxy/namespaces/ns/pods/a/b",
            "/apis/cluster.karmada.io/v1alpha1/clusters/m-2/proxy/api",
        ] {
            for method in ["GET", "POST", "DELETE", "get"] {
                let target = format!("{path}{behind}");
                let read = info(method, &target).behind(&templates).unwrap();
                assert_eq!((read.cluster(), read.prefix()), (Some(member), path.as_bytes()), "{target}");
                assert!(read.leads_alike(&templates) && !read.leads_alike(&[]), "{target}");
                assert!(!info(method, &target).leads_alike(&templates), "{target}");
                let again = info(method, &target).at(read.member()).unwrap();
                assert_eq!(read, again, "{target}");
                if behind.starts_with('/') {
                    let alone =
                        RequestInfo { raw_path: read.raw_path, member: read.member.clone(), ..info(method, behind) };
                    assert_eq!(read, alone, "{target}");
                }
            }
        }
        assert!(info("GET", &format!("{path}/api/v1/watch")).behind(&templates).is_err());
    }
}

#[test]
fn other_paths_than_those_to_members_stay_as_they_are() {
    let templates = MEMBERS.map(|(template, ..)| template.parse().unwrap());
    for target in ["/api/v1/pods", "/apis/cluster.karmada.io/v1alpha1/clusters/m-1", "/clusters", "/"] {
        let read = info("GET", target).behind(&templates).unwrap();
        assert_eq!(read, info("GET", target), "{target}");
        assert!(read.leads_alike(&templates) && read.leads_alike(&[]), "{target}");
        assert_eq!((read.cluster(), read.prefix()), (None, &b""[..]));
    }
    for target in ["/clusters/m-1%2Fapi", "//clusters/m-1/api", "/clusters/m-1/../m-2/api"] {
        assert!(info("GET", target).behind(&templates).is_err(), "{target}");
    }
}
