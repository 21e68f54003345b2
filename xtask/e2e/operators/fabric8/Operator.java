package dev.ctrlmesh;

import io.fabric8.kubernetes.api.model.ConfigMap;
import io.fabric8.kubernetes.api.model.ConfigMapBuilder;
import io.fabric8.kubernetes.api.model.GenericKubernetesResource;
import io.fabric8.kubernetes.api.model.HasMetadata;
import io.fabric8.kubernetes.api.model.ObjectMetaBuilder;
import io.fabric8.kubernetes.client.KubernetesClient;
import io.fabric8.kubernetes.client.KubernetesClientBuilder;
import io.fabric8.kubernetes.client.dsl.base.PatchContext;
import io.fabric8.kubernetes.client.dsl.base.PatchType;
import io.fabric8.kubernetes.client.dsl.base.ResourceDefinitionContext;
import io.fabric8.kubernetes.client.informers.ResourceEventHandler;
import io.fabric8.kubernetes.client.informers.SharedIndexInformer;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;

/** Publishes websites, as deploy/example-operator does in Go; its informers watch by WebSocket. */
public final class Operator {
    private static final long LOOK_EVERY_MILLIS = 50;
    private static final int LOOKS_UNTIL_ALL_AGAIN = 20;
    private static final ResourceDefinitionContext WEBSITES = new ResourceDefinitionContext.Builder()
        .withGroup("web.example.com").withVersion("v1alpha1").withKind("Website").withPlural("websites")
        .withNamespaced(true).build();
    private static final PatchContext APPLY = new PatchContext.Builder()
        .withPatchType(PatchType.SERVER_SIDE_APPLY).withFieldManager("fabric8-operator").withForce(true).build();

    private final KubernetesClient client;
    private final Set<String> changed = ConcurrentHashMap.newKeySet();

    private Operator(KubernetesClient client) {
        this.client = client;
    }

    public static void main(String[] arguments) throws InterruptedException {
        try (KubernetesClient client = new KubernetesClientBuilder().build()) {
            new Operator(client).run();
        }
    }

    private void run() throws InterruptedException {
        client.configMaps().inAnyNamespace().withLabel("web.example.com/site").inform(noting(this::owner));
        try (SharedIndexInformer<GenericKubernetesResource> websites =
            client.genericKubernetesResources(WEBSITES).inAnyNamespace().inform(noting(this::key))) {
            for (int look = 0; ; look++) {
                // By a timer everything again, whatever the watches said.
                if (look % LOOKS_UNTIL_ALL_AGAIN == 0) {
                    websites.getStore().list().forEach(website -> changed.add(key(website)));
                }
                for (String key : Set.copyOf(changed)) {
                    changed.remove(key);
                    publishAgain(websites.getStore().getByKey(key));
                }
                Thread.sleep(LOOK_EVERY_MILLIS);
            }
        }
    }

    private void publishAgain(GenericKubernetesResource website) {
        if (website == null) {
            return;
        }
        try {
            publish(website);
        } catch (RuntimeException error) {
            System.err.println(key(website) + ": " + error.getMessage());
        }
    }

    private void publish(GenericKubernetesResource website) {
        String namespace = website.getMetadata().getNamespace();
        String name = website.getMetadata().getName();
        Map<String, Object> spec = website.get("spec");
        int count = ((Number) spec.getOrDefault("pages", 1)).intValue();
        for (int number = 0; number < count; number++) {
            ConfigMap page = new ConfigMapBuilder()
                .withNewMetadata().withNamespace(namespace).withName(name + "-page-" + number)
                .addToLabels("web.example.com/site", name)
                .addNewOwnerReference().withApiVersion("web.example.com/v1alpha1").withKind("Website").withName(name)
                .withUid(website.getMetadata().getUid()).withController(true).withBlockOwnerDeletion(true)
                .endOwnerReference().endMetadata()
                .addToData("index.html", "<h1>" + spec.get("title") + "</h1><p>page " + number + "</p>\n").build();
            client.resource(page).patch(APPLY);
        }
        GenericKubernetesResource status = new GenericKubernetesResource();
        status.setApiVersion("web.example.com/v1alpha1");
        status.setKind("Website");
        status.setMetadata(new ObjectMetaBuilder().withNamespace(namespace).withName(name).build());
        status.setAdditionalProperty("status",
            Map.of("observedGeneration", website.getMetadata().getGeneration(), "pages", count));
        client.genericKubernetesResources(WEBSITES).inNamespace(namespace).resource(status)
            .subresource("status").patch(APPLY);
    }

    private String key(HasMetadata object) {
        return object.getMetadata().getNamespace() + "/" + object.getMetadata().getName();
    }

    private String owner(ConfigMap page) {
        return page.getMetadata().getNamespace() + "/" + page.getMetadata().getLabels().get("web.example.com/site");
    }

    private <T> ResourceEventHandler<T> noting(java.util.function.Function<T, String> website) {
        return new ResourceEventHandler<>() {
            @Override
            public void onAdd(T object) {
                changed.add(website.apply(object));
            }

            @Override
            public void onUpdate(T before, T object) {
                changed.add(website.apply(object));
            }

            @Override
            public void onDelete(T object, boolean isUnknown) {
                changed.add(website.apply(object));
            }
        };
    }
}
